"""Modes of a training see nothing of what traindiff computes."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.hooks.seen_by_modes import MODES, Functions, Operators
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.observe.hooks.trainings import TRAININGS, Observe
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.errors import NonFiniteError


@pytest.mark.parametrize("name", TRAININGS)
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sees_the_same_with_and_without_a_recording(mode: str, name: str, tmp_path: Path) -> None:
    def train(observe: Observe) -> tuple[Any, Any]:
        with MODES[mode]() as seen:
            return TRAININGS[name](observe), seen()

    # To record operators, or to check products, is to put a mode of traindiff's above the training's. Through it, torch
    # calls `detach` on what autograd saves in another way, which DebugMode tells apart.
    observe = [one for one in OBSERVABLE if mode != "debugging" or one not in ("operators", "products")]
    outcome, seen = train(lambda *_: nullcontext())

    recorded_outcome, recorded_seen = train(
        lambda model, optimizer: traindiff.record(
            tmp_path / "run", model, optimizer, observe=observe, evaluation=True, strict=True
        )
    )

    assert seen or (mode, name) == ("flops", "lstm")  # no formula is known to it
    assert recorded_seen == seen
    assert_bitwise_equal(recorded_outcome, outcome)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sees_the_same_with_and_without_a_watch(mode: str) -> None:
    def train(observe: Observe) -> tuple[Any, Any]:
        with MODES[mode]() as seen:
            return TRAININGS["checkpointing"](observe), seen()

    outcome, seen = train(lambda *_: nullcontext())

    watched_outcome, watched_seen = train(lambda model, optimizer: traindiff.watch(model, optimizer, output=None))

    assert watched_seen == seen
    assert_bitwise_equal(watched_outcome, outcome)


def test_a_function_that_a_watch_calls_runs_in_the_modes_of_the_training() -> None:
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Operators() as operators, traindiff.watch(model, on_detect=lambda _: seen.append(len(operators.seen))):
        before = len(operators.seen)
        model(torch.full((1, 2), torch.nan))
        assert seen[0] > before
        torch.ones(1)

    assert operators.seen[-1].startswith("aten.ones")


def test_what_a_watch_runs_again_is_run_on_the_default_device_of_the_training(tmp_path: Path) -> None:
    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / torch.zeros(2, dtype=torch.get_default_dtype())

    model = nn.Sequential(Makes())
    watch = traindiff.watch(model, output=tmp_path)
    with torch.device("cpu"), Operators() as operators, watch, pytest.raises(NonFiniteError):
        model(torch.zeros(1, 2))

    assert (
        len([one for one in operators.seen if one.startswith("aten.zeros")]) == 2
    )  # the input, and once in the module
    assert list(tmp_path.glob("*/module.json"))


@pytest.mark.parametrize("created_fake", [False, True])
def test_a_training_with_fake_tensors_is_recorded_as_one_without_numbers(created_fake: bool, tmp_path: Path) -> None:
    def train(observe: Observe) -> nn.Module:
        torch.manual_seed(0)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake if created_fake else nullcontext():
            model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        with fake, observe(model, optimizer):
            for _ in range(2):
                loss = nn.functional.cross_entropy(model(torch.randn(3, 4)), torch.randint(2, (3,)))
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return model

    expected = train(lambda *_: nullcontext())

    actual = train(lambda model, optimizer: traindiff.record(tmp_path / "run", model, optimizer, strict=True))

    found = rows(tmp_path / "run", phase="forward")
    assert {seen.unobserved for seen, _ in found} == {"a FakeTensor has no elements"}
    assert {seen.step for seen, _ in found} == {0, 1}
    pairs = zip(actual.parameters(), expected.parameters(), strict=True)
    assert created_fake or all(torch.equal(*pair) for pair in pairs)


def test_a_subclass_of_tensors_is_not_told_which_functions_a_tap_calls(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    told: list[list[Any]] = []

    class Told(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            told[-1].append(func)
            return super().__torch_function__(func, types, args, kwargs)

    def train() -> type:
        told.append([])
        output = model(torch.ones(2, 3).as_subclass(Told))
        output.sum().backward()
        return type(output)

    kind = train()
    with traindiff.record(tmp_path / "run", model, strict=True):
        assert train() is kind

    assert told[0] == told[1]
    assert rows(tmp_path / "run", phase="forward")[0][1]["count"] == 6


def test_modes_are_on_again_after_a_hook_that_raises(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with Operators() as outer, Operators() as inner, Functions() as functions:
        with traindiff.record(tmp_path / "run", model) as run:
            with pytest.warns(traindiff.TraindiffWarning, match="log"):
                run.log("loss", object())  # type: ignore[arg-type]
            torch.ones(1)
        torch.zeros(1)

    for mode in (outer, inner, functions):
        assert [name for name in ("ones", "zeros") if any(name in one for one in mode.seen)] == ["ones", "zeros"]
    assert outer.seen == inner.seen
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_trace_of_a_recorded_model_holds_no_operator_of_a_tap(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def traced() -> list[str]:
        return [str(node.target) for node in make_fx(model)(torch.ones(2, 3)).graph.nodes]

    expected = traced()
    with traindiff.record(tmp_path / "run", model, strict=True):
        assert traced() == expected
