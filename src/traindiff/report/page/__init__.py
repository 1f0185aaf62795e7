"""A result as one HTML file that needs nothing else: no network, no server."""

from traindiff.report.page.content import Page
from traindiff.report.page.writing import page_of, write

__all__ = ["Page", "page_of", "write"]
