"""Numbers of sites over the steps, in bounded memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traindiff.analyse.merge import history
from traindiff.analyse.merge.history import History


def noted(values: list[list[float]], *, steps: list[int] | None = None) -> History[str]:
    """A history of sites `0`, `1`, ... with a row of values each."""
    found: History[str] = History(("size", "step"))
    for column, step in enumerate(steps or range(len(values[0]))):
        for site, row in enumerate(values):
            found.note(str(site), step, (row[column], float(step)))
    return found


def test_every_step_has_a_column_while_there_is_room() -> None:
    found = noted([[1.0, 3.0, 2.0], [0.0, math.inf, 5.0]], steps=[0, 4, 10])

    assert found.columns == [(0, 0), (4, 4), (10, 10)]
    assert found.of("size").tolist() == [[1.0, 3.0, 2.0], [0.0, math.inf, 5.0]]


def test_a_site_that_comes_later_has_nothing_before() -> None:
    found: History[str] = History(("size",))
    found.note("first", 0, (1.0,))
    found.note("second", 1, (2.0,))

    assert np.isnan(found.of("size")).tolist() == [[False, True], [True, False]]


def test_the_largest_of_what_one_step_has_of_a_site_is_kept() -> None:
    found: History[str] = History(("size", "other"))

    assert found.note("site", 0, (2.0, 1.0))
    assert not found.note("site", 0, (1.0, 7.0))
    assert found.note("site", 0, (3.0, 5.0))
    assert found.cells.tolist() == [[[3.0, 5.0]]]


@pytest.mark.parametrize("num_steps", [8, 9, 16, 17, 100])
def test_many_steps_share_columns_and_each_keeps_its_largest(monkeypatch: pytest.MonkeyPatch, num_steps: int) -> None:
    monkeypatch.setattr(history, "MAX_COLUMNS", 8)
    monkeypatch.setattr(history, "MIN_COLUMNS", 8)
    values = np.random.default_rng(0).random((3, num_steps)).astype(np.float32)

    found = noted(values.tolist())

    assert len(found.columns) <= 8
    assert found.columns[0][0] == 0
    assert found.columns[-1][1] == num_steps - 1
    for column, (first, last) in enumerate(found.columns):
        assert last - first < found.width
        assert found.of("size")[:, column].tolist() == values[:, first : last + 1].max(axis=1).tolist()
        assert found.of("step")[:, column].tolist() == (first + values[:, first : last + 1].argmax(axis=1)).tolist()


@given(st.lists(st.integers(0, 30), min_size=1, max_size=60), st.integers(1, 6))
def test_no_order_of_steps_and_sites_loses_the_largest(steps: list[int], num_sites: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(history, "MAX_CELLS", 24)
        patched.setattr(history, "MIN_COLUMNS", 4)
        found: History[int] = History(("size",))
        for number, step in enumerate(steps):
            found.note(number % num_sites, step, (float(number),))

    assert np.nanmax(found.of("size")) == len(steps) - 1
    assert sum(last >= first for first, last in found.columns) == len(found.columns) <= 24
    for step in steps:
        assert 0 <= found.column_of(step) < len(found.columns)


def test_memory_grows_neither_with_steps_nor_beyond_the_cells_with_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_CELLS", 4096)
    monkeypatch.setattr(history, "MIN_COLUMNS", 8)
    found: History[int] = History(("size",))
    for step in range(300):
        for site in range(100):
            found.note(site, step, (1.0,))

    assert found.cells.size <= 4096
    assert len(found.columns) <= 40


def test_sizes_beyond_float32_are_infinite() -> None:
    found: History[str] = History(("size",))
    found.note("site", 0, (1e300,))

    assert found.of("size").tolist() == [[math.inf]]
