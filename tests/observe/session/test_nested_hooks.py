"""Hooks that other hooks call, or that are called together, are as harmless as those that torch calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from tests.observe.hooks.seen_by_modes import Functions, Operators
from traindiff.errors import TraindiffWarning
from traindiff.observe.torch.hooks.out_of_sight import hidden, in_sight
from traindiff.observe.torch.session import observations
from traindiff.observe.torch.session.observations import GRAPHS, Containment


@pytest.fixture
def faults() -> list[str]:
    return []


@pytest.fixture
def containment(faults: list[str]) -> Containment:
    return Containment(strict=False, report=lambda tap, _: faults.append(tap))


def fail() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize("around", ["hook", "together"])
def test_a_hook_that_fails_inside_disables_its_own_tap_alone(
    around: str, containment: Containment, faults: list[str]
) -> None:
    called: list[str] = []
    inner, next_one = containment.guarded("inner", fail), containment.guarded("next", lambda: called.append("next"))

    def both() -> None:
        inner()
        next_one()

    call: Callable[[], Any] = containment.guarded("outer", both)
    if around == "together":
        call = lambda: containment.together(both)  # noqa: E731

    with pytest.warns(TraindiffWarning, match="inner"):
        call()
    call()

    assert called == ["next", "next"]
    assert faults == ["inner"]
    assert not containment.is_running()
    assert hidden.modes is hidden.asked_by is None


def test_an_error_that_is_raised_inside_leaves_nothing_hidden() -> None:
    containment = Containment(strict=True, report=lambda *_: None)

    with pytest.raises(ValueError, match="on purpose"):
        containment.together(containment.guarded("tap", fail))

    assert not containment.is_running()
    assert hidden.modes is hidden.asked_by is None


def test_code_of_the_training_that_a_hook_calls_may_trace(containment: Containment) -> None:
    called: list[bool] = []
    inner = containment.guarded("inner", lambda: called.append(True))

    def traced(x: Tensor) -> Tensor:
        inner()
        return x + 1

    def outer() -> None:
        inner()
        with in_sight():
            make_fx(traced)(torch.ones(2))
        inner()

    containment.guarded("outer", outer)()

    assert len(called) == 2


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated:DeprecationWarning")
def test_hooks_are_called_together_neither_in_a_trace_nor_in_a_cuda_graph(
    containment: Containment, faults: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[bool] = []
    hook = containment.guarded("tap", lambda: called.append(True))

    def traced(x: Tensor) -> Tensor:
        containment.together(hook)
        return x + 1

    make_fx(traced)(torch.ones(2))
    torch.jit.trace(traced, torch.ones(2), check_trace=False)  # type: ignore[no-untyped-call]
    monkeypatch.setattr(observations, "is_capturing", lambda: True)
    with pytest.warns(TraindiffWarning, match="CUDA graph"):
        containment.together(hook)

    assert not called
    assert faults == [GRAPHS]


def test_what_cleans_up_in_a_cuda_graph_calls_no_hook_that_observes(
    containment: Containment, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    observes = containment.guarded("observes", lambda: called.append("observes"))

    def clean() -> None:
        called.append("cleans")
        observes()

    cleans = containment.guarded("cleans", clean, always=True)
    monkeypatch.setattr(observations, "is_capturing", lambda: True)
    with pytest.warns(TraindiffWarning, match="CUDA graph"):
        cleans()

    assert called == ["cleans"]


def test_no_mode_sees_what_hooks_compute_that_are_called_together(containment: Containment) -> None:
    hook = containment.guarded("tap", lambda: torch.ones(2).exp())

    with Operators() as operators, Functions() as functions:
        containment.together(hook)
        containment.guarded("outer", hook)()

    assert not operators.seen
    assert not functions.seen
