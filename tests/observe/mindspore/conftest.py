"""Where these tests run: in an environment with MindSpore, which needs an older NumPy than the others have."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("mindspore") else ["test_*.py"]


def pytest_report_header() -> str | None:
    """Why nothing is collected here, where that is so."""
    if collect_ignore_glob:
        return "tests/observe/mindspore: not collected, mindspore is not installed here (make test-mindspore)"
    return None
