"""Reports of the recordings under a directory, in a browser on this machine. Needs no framework."""

from traindiff.present.viewer.server import Viewer

__all__ = ["Viewer"]
