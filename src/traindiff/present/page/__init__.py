"""A result as one HTML file that needs nothing else: no network, no server."""

from traindiff.present.page.content import Page, page_of
from traindiff.present.page.writing import write

__all__ = ["Page", "page_of", "write"]
