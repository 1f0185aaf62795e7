"""The registry of taps and the taps themselves say the same."""

from __future__ import annotations

import ast
from importlib import import_module
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest

from traindiff.core.site import PHASES
from traindiff.core.tap_registry import EVERYTHING, LOSES, OBSERVABLE, OBSERVED_BY_DEFAULT, TAPS, Tap, asked_for_as

SOURCE = Path(__file__).parents[2] / "src" / "traindiff"
PAGE = Path(__file__).parents[2] / "docs" / "observe.md"
ATTACHED = [tap for tap in TAPS if not tap.part_of]


@pytest.mark.parametrize("tap", ATTACHED, ids=lambda tap: tap.name)
def test_a_tap_is_the_module_of_its_name_and_is_attached_to_a_context(tap: Tap) -> None:
    assert list(signature(import_module(f"traindiff.observe.torch.hooks.{tap.name}").attach).parameters) == ["context"]


def test_every_tap_is_there_once() -> None:
    names = [tap.name for tap in TAPS]

    assert len(names) == len(set(names))
    assert {tap.part_of for tap in TAPS} <= {"", *names, "optimizers", "session"}


def _filed_under() -> set[str]:
    """The names in calls of `guarded("name", ...)` and `partial(sink.guarded, "name")`."""
    found = set()
    for folder in ("common", "torch/hooks", "torch/session", "torch/sharding"):
        for path in (SOURCE / "observe" / folder).glob("*.py"):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            for called, argument in ((one, arg) for call in calls for one, arg in pairwise([call.func, *call.args])):
                if getattr(called, "attr", "").lstrip("_") == "guarded" and isinstance(argument, ast.Constant):
                    found.add(argument.value)
    return found


def test_every_name_that_faults_are_filed_under_is_a_tap_or_what_nothing_can_do_without() -> None:
    assert {"samples", "root_forward", "log"} <= _filed_under()
    assert _filed_under() - LOSES.keys() == {"describe", "in_flight", "writer"}


def test_what_there_is_to_observe_is_the_phases_and_what_taps_have_of_their_own() -> None:
    assert OBSERVABLE[: len(PHASES)] == PHASES
    assert len(OBSERVABLE) == len(set(OBSERVABLE))
    assert {name for tap in TAPS for name in tap.observe} <= set(OBSERVABLE)


def test_what_a_stage_is_asked_for_as_follows_from_its_tap() -> None:
    assert asked_for_as("grad", "micro") == "grad.micro"
    assert asked_for_as("grad", "unscaled") == "grad.stages"
    assert asked_for_as("grad", "") == "grad"
    assert asked_for_as("forward", "recomputed") == "forward"


def test_a_tap_that_is_always_on_says_what_it_loses_or_loses_everything() -> None:
    assert LOSES["root_forward"] == EVERYTHING
    assert LOSES["batch_axis"] == ()


def test_the_page_on_what_is_observed_says_what_each_name_adds() -> None:
    modules = {name: import_module(f"traindiff.observe.torch.hooks.{tap.name}") for tap in TAPS for name in tap.own}
    rows = [
        f"| `{name}` | {'yes' if name in OBSERVED_BY_DEFAULT else 'no'} | {_first_line(modules[name])} |"
        for name in OBSERVABLE
        if name not in PHASES
    ]

    assert "\n".join(rows) + "\n" in PAGE.read_text(), "\n".join(rows)


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").partition("\n")[0]
