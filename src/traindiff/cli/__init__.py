"""The `traindiff` command: parse, call, print."""

from traindiff.cli.app import main

__all__ = ["main"]
