"""Ask everything that tests ask of recordings with several ranks of their compact forms as well.

    python -m pytest -p tests.campaigns.compacted tests/observe/sharding tests/analyse

Each recording that a test compares or checks is compacted, and compared or checked again: both compact, and the
candidate alone. What is said must be the same, word for word. The end says how often that was asked, and how many
steps were merged; the tests fail where it differs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

import traindiff
from tests.compacted import without_paths
from traindiff.analyse import check as check_package
from traindiff.analyse import compare as compare_package
from traindiff.analyse.check import checking
from traindiff.analyse.compact import compact
from traindiff.analyse.compare import comparing
from traindiff.errors import ConfigError, TraindiffError
from traindiff.storage import open_recording

_ASKED: Counter[str] = Counter()
_MADE: dict[tuple[str, ...], str | None] = {}
_DIFFERENT: list[str] = []
_ONE_WEIGHT_ON_TWO_STAGES = "holds one weight on several stages"
"""Of the reason why a pipeline cannot be compared: docs/scale.md."""


def pytest_configure() -> None:
    """Put functions in place that also ask the compact forms."""
    directory = tempfile.mkdtemp(prefix="traindiff-compacted-")
    _MADE[()] = directory
    comparing.compare = compare_package.compare = traindiff.compare = _asking_twice(comparing.compare, 2)
    checking.check = check_package.check = traindiff.check = _asking_twice(checking.check, 1)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Fail the test in which something else was said of a compact form."""
    found, _DIFFERENT[:] = list(_DIFFERENT), []
    if found:
        pytest.fail(f"{item.nodeid}: a compact form says something else: {found[0][:3000]}", pytrace=False)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how often compact forms were asked, and remove them."""
    shutil.rmtree(str(_MADE[()]), ignore_errors=True)
    terminalreporter.write_line(", ".join(f"{number} {what}" for what, number in sorted(_ASKED.items())))


def _asking_twice(ask: Callable[..., Any], num_recordings: int) -> Callable[..., Any]:
    @wraps(ask)
    def asked(*given: Any, **options: Any) -> Any:
        paths, rest = given[:num_recordings], given[num_recordings:]
        found = ask(*given, **options)
        made = [_compacted(path) for path in paths]
        whole = without_paths(found.to_json(), *paths)
        for count in range(num_recordings):
            pairs = enumerate(zip(paths, made, strict=True))
            sides = [own if at < count or new is None else new for at, (own, new) in pairs]
            if sides == list(paths):
                continue
            _ASKED[f"{ask.__name__}s of compact forms"] += 1
            try:
                again = without_paths(ask(*sides, *rest, **options).to_json(), *sides)
            except TraindiffError as error:
                if _ONE_WEIGHT_ON_TWO_STAGES not in str(error):
                    raise
                _ASKED["refused: one weight on two stages of a pipeline"] += 1
                continue
            if again != whole:
                _DIFFERENT.append(f"{whole}\n\n{again}")
        return found

    return asked


def _compacted(path: Any) -> str | None:
    """The compact form of a recording with several ranks; None for others, and for those with more than summaries."""
    where = Path(os.fspath(path)).resolve()
    if open_recording(str(where)).world_size < 2:
        return None
    about = (str(where), *sorted(f"{file} {file.stat().st_mtime_ns}" for file in where.rglob("*") if file.is_file()))
    if about not in _MADE:
        target = Path(str(_MADE[()]), str(len(_MADE)))
        try:
            made = compact(where, target)
        except ConfigError:
            _MADE[about] = None
        else:
            _MADE[about] = str(target)
            _ASKED["steps that were merged"] += made.steps - sum(made.whole.values())
            _ASKED["steps that stay whole"] += sum(made.whole.values())
    return _MADE[about]
