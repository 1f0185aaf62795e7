"""The command line with all its commands: each registers itself with `app` where it is imported."""

from __future__ import annotations

from traindiff.cli import check, compare, demo, doctor, export, investigate, replay, report, run, show, verify, view  # noqa: F401
from traindiff.cli.app import app

__all__ = ["app"]
