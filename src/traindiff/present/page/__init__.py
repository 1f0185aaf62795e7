"""A result as one HTML file that needs nothing else: no network, no server."""

from traindiff.present.page.content import Page
from traindiff.present.page.writing import page_of, write

__all__ = ["Page", "page_of", "write"]
