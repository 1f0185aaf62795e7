"""The command line with all its commands: each registers itself with `app` where it is imported."""

from __future__ import annotations

from traindiff.cli import (  # noqa: F401
    check,
    compact,
    compare,
    demo,
    doctor,
    explain,
    investigate,
    ls,
    mcp,
    recordings,
    report,
    rerun,
    resume,
    run,
    verify,
    weights,
)
from traindiff.cli.app import app

__all__ = ["app"]
