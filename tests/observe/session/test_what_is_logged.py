"""A value that is no number is refused at once, and what is logged after it is recorded."""

from __future__ import annotations

import linecache
import warnings
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import SGD

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import rows
from tests.observe.hooks.trainings import batches


class Raises:
    """A number of a library whose float() fails."""

    def __float__(self) -> float:
        raise RuntimeError("not now")


NO_NUMBERS: dict[str, tuple[Any, str]] = {
    "a text": ("abc", "it is a str, not a number"),
    "a text of digits": ("1.5", "it is a str, not a number"),
    "nothing": (None, "it is None, not a number"),
    "a list": ([1.0, 2.0], "it is a list, not a number"),
    "a dict": ({"loss": 1.0}, "it is a dict, not a number"),
    "a tensor": (torch.ones(2, 3), "it is a tensor of 6 elements, of shape (2, 3)"),
    "an empty tensor": (torch.ones(0), "it is a tensor of 0 elements, of shape (0,)"),
    "an array": (np.ones(4), "it has 4 elements, not one"),
    "an array of texts": (np.array(["abc"]), "it is a ndarray, of which float() raises ValueError"),
    "a complex number": (1 + 2j, "it is a complex, not a number"),
    "a complex array": (np.complex64(1j), "it is a complex number"),
    "a complex tensor": (torch.tensor(1j), "it is a complex number"),
    "a huge integer": (10**400, "it is an int that is larger than any float"),
    "what cannot be read": (Raises(), "it is a Raises, of which float() raises RuntimeError"),
}

NUMBERS: dict[str, tuple[Any, float]] = {
    "an int": (3, 3.0), "a bool": (True, 1.0), "a large int": (2**70, 2.0**70), "a decimal": (Decimal("1.5"), 1.5),
    "a fraction": (Fraction(1, 2), 0.5), "a NumPy scalar": (np.float16(1.5), 1.5),
    "a NumPy bool": (np.bool_(True), 1.0),
    "an array of one": (np.array([[2]]), 2.0), "a tensor of one": (torch.tensor([[2.5]]), 2.5),
    "an integral tensor": (torch.tensor(7), 7.0), "a boolean tensor": (torch.tensor(True), 1.0),
}  # fmt: skip


Steps = Callable[[int], Iterator[Any]]
"""Yields the recording in each of so many steps."""


@pytest.fixture
def training(tmp_path: Path) -> Steps:
    """Steps of a training that is recorded at `tmp_path / "run"`."""
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)

    def steps(number: int) -> Iterator[Any]:
        with traindiff.record(tmp_path / "run", model, optimizer) as run:
            for batch in batches(number):
                loss = model(batch).square().mean()
                yield run
                loss.backward()
                optimizer.step()

    return steps


def recorded(path: Path, name: str) -> list[tuple[int, str, float | None]]:
    """Step, why it was not observed, and value."""
    found = rows(path / "run", phase="loss", path=name, slot="logged")
    return [(seen.step, seen.unobserved, None if seen.unobserved else float(summary["sum"])) for seen, summary in found]


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_what_is_no_number_is_refused_and_later_calls_are_recorded(kind: str, training: Steps, tmp_path: Path) -> None:
    value, why = NO_NUMBERS[kind]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run in training(3):
            run.log("x", value if run.step < 2 else 0.5)
            run.log("y", 2.0)
    (warning,) = caught
    assert issubclass(warning.category, traindiff.TraindiffWarning)
    assert (warning.filename, linecache.getline(__file__, warning.lineno).strip()[:8]) == (__file__, "run.log(")
    assert str(warning.message).startswith(f"log('x', ...) recorded nothing: {why}. Give it a number, or a tensor with")
    assert recorded(tmp_path, "x") == [(0, why, None), (1, why, None), (2, "", 0.5)]
    assert recorded(tmp_path, "y") == [(step, "", 2.0) for step in range(3)]


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_kind_of_number_is_recorded(kind: str, training: Steps, tmp_path: Path) -> None:
    value, expected = NUMBERS[kind]
    for run in training(1):
        run.log("x", value)
    assert recorded(tmp_path, "x") == [(0, "", expected)]


def test_a_value_that_is_refused_beside_one_that_is_not_takes_the_place_of_none(
    training: Steps, tmp_path: Path
) -> None:
    for run in training(1):
        with pytest.warns(traindiff.TraindiffWarning, match="recorded nothing"):
            run.log("x", "abc")
        run.log("x", 1.0)
        run.log("x", None)
        run.log("x", 3.0)
    assert [value for *_, value in recorded(tmp_path, "x")] == [None, 1.0, None, 3.0]


def test_after_the_step_it_is_noted_in_the_step_that_has_just_ended(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer) as run:
        for batch in batches(2):
            model(batch).square().mean().backward()
            optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                run.log("x", "abc")
    assert [step for step, *_ in recorded(tmp_path, "x")] == [0, 1]


@pytest.mark.parametrize(
    ("weight", "why"),
    [("abc", "its weight is a str, not a number"), (float("nan"), "its weight is nan"),
     ([1], "its weight is a list, not a number")],
)  # fmt: skip
def test_a_weight_that_is_no_number_is_refused_too(weight: Any, why: str, training: Steps, tmp_path: Path) -> None:
    for run in training(2):
        if run.step == 0:
            with pytest.warns(traindiff.TraindiffWarning, match=why):
                run.log("x", 1.0, weight=weight)
        else:
            run.log("x", 1.0, weight=2)
    assert recorded(tmp_path, "x") == [(0, why, None), (1, "", 1.0)]


@pytest.mark.parametrize(("name", "path"), [(3, "3"), (None, "None"), ("\ud800x", "\\ud800x"), ("", "")])
def test_names_of_any_kind_are_recorded(name: Any, path: str, training: Steps, tmp_path: Path) -> None:
    for run in training(2):
        run.log(name, 1.0)
    assert recorded(tmp_path, path) == [(0, "", 1.0), (1, "", 1.0)]


def test_warnings_that_are_errors_do_not_end_the_training(training: Steps, tmp_path: Path) -> None:
    for run in training(2):
        run.log("x", "abc" if run.step == 0 else 1.0)
    assert [value for *_, value in recorded(tmp_path, "x")] == [None, 1.0]


def test_names_that_are_made_up_in_each_step_are_warned_of_only_so_often(training: Steps) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run in training(2):
            for number in range(30):
                run.log(f"{run.step}-{number}", None)
    assert len(caught) == 20


def test_inspect_and_log_of_tensors_without_numbers_leave_the_taps_on(training: Steps, tmp_path: Path) -> None:
    strange = (torch.empty(1, device="meta"), torch.ones(1).to_sparse(), torch.empty(1, dtype=torch.float8_e4m3fn))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run in training(1):
            for number, one in enumerate((*strange, None, "abc", [1])):
                traindiff.inspect(f"inspected.{number}", one)
                run.log(f"logged.{number}", one)
            traindiff.inspect("inspected.last", torch.ones(2))
            run.log("logged.last", 1.0)
    assert not [one for one in caught if "observes nothing more" in str(one.message)]
    assert recorded(tmp_path, "logged.last") == [(0, "", 1.0)]
    assert rows(tmp_path / "run", path="inspected.last", slot="value")


def test_a_value_that_is_logged_after_the_end_is_said_to_be_lost(tmp_path: Path) -> None:
    model, path = mlp(), tmp_path / "run"
    with traindiff.record(path, model, SGD(model.parameters(), lr=0.1)) as run:
        run.log("within", 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.log("after", 2.0)
        run.log("after", 3.0)
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message).startswith(
        f"log('after', ...) recorded nothing: the recording {path} is closed. Log inside"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.log("as an error", 1.0)
