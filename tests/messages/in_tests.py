"""What `traindiff.testing` says in tests of trainings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.made_up import FC, record, scaled
from tests.messages.provoking import Chapter
from tests.run.verify.recipes import mlp, one_thread
from traindiff.testing import Golden, assert_equivalent, formula

chapter = Chapter("Tests: assert_equivalent and golden recordings", [])
situation = chapter.situation


def failure(check: Callable[[], object]) -> str:
    """What an assertion says."""
    with pytest.raises(AssertionError) as raised:
        check()
    return str(raised.value)


@situation("recordings that part")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    baseline, candidate = record(here / "baseline"), record(here / "candidate", scaled(FC, 0.01, step=1))
    return failure(lambda: assert_equivalent(baseline, candidate))


@situation("recordings that agree, and not in every bit")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    baseline, candidate = record(here / "baseline"), record(here / "candidate", scaled(FC, 0.01, step=1))
    return failure(lambda: assert_equivalent(baseline, candidate, rtol=0.1, identical=True))


@situation("a recording and a recipe")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    assert_equivalent(record(here / "baseline"), mlp())


@situation("settings of recipes for recordings")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    assert_equivalent(record(here / "baseline"), record(here / "candidate"), output=here / "runs", seed=1)


@situation("steps of recipes that are no number")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    assert_equivalent(mlp(), mlp(), steps="0-3")


@situation("a golden recording that is not there")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    golden = Golden(directory=here / "golden-recordings", scratch=here / "scratch")
    return failure(lambda: golden.check(record(here / "candidate")))


@situation("a training that parts from its golden recording")
def _(here: Path, patched: pytest.MonkeyPatch) -> str:
    made = Golden(directory=here / "golden-recordings", scratch=here / "scratch", update=True)
    made.check(record(here / "baseline"))
    golden = Golden(directory=here / "golden-recordings", scratch=here / "scratch")
    return failure(lambda: golden.check(record(here / "candidate", scaled(FC, 0.01, step=1))))


@situation("one name for two trainings of a test")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    golden = Golden(directory=here / "golden-recordings", scratch=here / "scratch", update=True)
    with one_thread():
        golden.recipe(mlp(), name="mlp", steps=1, replicas=())
        golden.recipe(mlp(), name="mlp", steps=1, replicas=())


@situation("a formula of an optimizer that is no class")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    formula("Lion")  # type: ignore[arg-type]
