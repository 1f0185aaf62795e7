"""Ask everything that tests ask of recordings once more of recordings that are read in blocks, cut anywhere.

    python -m pytest -p tests.campaigns.in_blocks tests/observe/sharding tests/analyse

Each comparison and each check is asked again, with blocks and workers as `tests.in_blocks` has them. What is said must
be the same, word for word. The end says how often that was asked, and how many blocks were read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest

import traindiff
from tests.in_blocks import in_blocks
from traindiff.analyse import check as check_package
from traindiff.analyse import compare as compare_package
from traindiff.analyse.check import checking
from traindiff.analyse.compare import comparing

_ASKED: Counter[str] = Counter()
_DIFFERENT: list[str] = []


def pytest_configure() -> None:
    """Put functions in place that also ask in blocks."""
    comparing.compare = compare_package.compare = traindiff.compare = _asking_twice(comparing.compare)
    checking.check = check_package.check = traindiff.check = _asking_twice(checking.check)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail the test in which something else was said in blocks."""
    found, _DIFFERENT[:] = list(_DIFFERENT), []
    if found:
        pytest.fail(f"{item.nodeid}: in blocks, something else is said: {found[0][:3000]}", pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how often it was asked."""
    terminalreporter.write_line(", ".join(f"{number} {what}" for what, number in sorted(_ASKED.items())))


def _asking_twice(ask: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(ask)
    def asked(*given: Any, **options: Any) -> Any:
        found = ask(*given, **options)
        if options.get("follow") is None and options.get("workers") is None:
            with in_blocks(_ASKED.total()) as tasks:
                again = ask(*given, **options, workers=2)
            _ASKED[f"{ask.__name__}s"] += 1
            _ASKED["blocks"] += tasks.num_calls
            if (str(again), again.to_json()) != (str(found), found.to_json()):
                _DIFFERENT.append(f"{found}\n\n{again}")
        return found

    return asked
