"""The version of traindiff, read by the build and written into every recording."""

__version__ = "0.1.0"
