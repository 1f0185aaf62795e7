"""Replays agree with torch, cost what they say, and disturb nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import row, rows, unobserved
from tests.observe.hooks.trainings import TRAININGS, batches
from traindiff.core.shards import Piece
from traindiff.observe.torch.hooks.optimizer_replay import RANGE, OptimizerReplayTap
from traindiff.observe.torch.hooks.replay_formulas import (
    Before,
    Units,
    moments_of,
    rule_name,
    rule_of,
    step_of,
    variants,
)

EXACT = Units(storage=2.0**-53, arithmetic=2.0**-53, tiny=torch.finfo(torch.float64).tiny)

SGDS = [
    (SGD, {"lr": 0.1, "momentum": momentum, "dampening": dampening, "nesterov": nesterov, "weight_decay": decay, **up})
    for momentum, dampening, nesterov, decay, up in product(
        (0.0, 0.9), (0.0, 0.3), (False, True), (0.0, 0.1), ({}, {"maximize": True})
    )
    if not nesterov or (momentum and not dampening)
]
ADAMS = [
    (kind, {"lr": 0.01, "amsgrad": amsgrad, "weight_decay": decay, "maximize": maximize, "betas": betas, "eps": eps})
    for kind, amsgrad, decay, maximize, (betas, eps) in product(
        (Adam, AdamW), (False, True), (0.0, 0.1), (False, True), (((0.9, 0.999), 1e-8), ((0.5, 0.9), 1e-3))
    )
]


def optimizer_of(kind: type[Optimizer], parameters: Any, **options: Any) -> Optimizer:
    return kind(parameters, **options)  # type: ignore[call-arg]


@pytest.mark.parametrize(("kind", "options"), [*SGDS, *ADAMS])
def test_the_formulas_are_those_of_torch_in_float64(kind: type[Optimizer], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, dtype=torch.float64))
    optimizer = optimizer_of(kind, [parameter], **options)
    for _ in range(5):
        parameter.grad = torch.randn_like(parameter) * torch.logspace(-6, 2, 40, dtype=torch.float64)
        state = optimizer.state.get(parameter, {})
        before = Before(
            parameter=parameter.detach().clone(),
            gradient=parameter.grad.clone(),
            state={name: moment.clone() for name, moment in moments_of(optimizer, state).items()},
            step=step_of(state),
        )
        rule = rule_of(optimizer, optimizer.param_groups[0])
        optimizer.step()

        update = rule.replay(before, EXACT)
        torch.testing.assert_close(before.parameter + update.value, parameter.detach(), rtol=1e-12, atol=1e-14)
        assert (update.rounding > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"lr": torch.tensor(0.01)}])
@pytest.mark.parametrize(("kind", "options"), [SGDS[-1], *ADAMS[::5]])
def test_what_rounding_allows_is_never_exceeded_by_torch(
    kind: type[Optimizer], options: dict[str, Any], how: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    if kind is SGD and how == {"fused": True} and dtype == torch.bfloat16:
        pytest.skip("torch 2.13 on the CPU does not update; tests/analyse/rules/test_replay.py")
    torch.manual_seed(0)
    model = mlp().to(dtype)
    optimizer = optimizer_of(kind, model.parameters(), **{**options, **how})
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for batch in batches(3):
            model(batch.to(dtype)).square().mean().backward()
            optimizer.step()

    residuals = rows(tmp_path / "run", stage="residual")
    assert len(residuals) == 3 * len(list(model.parameters()))
    assert max(max(-summary["minimum"], summary["maximum"]) for _, summary in residuals) <= 1.0
    assert not [seen.stage for seen, _ in rows(tmp_path / "run") if seen.stage.startswith("variant")]


def test_each_known_mistake_is_another_update() -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(40, dtype=torch.float64))
    for kind, options in ((SGD, {"lr": 0.1, "momentum": 0.7, "weight_decay": 0.1}), (AdamW, {"betas": (0.7, 0.97)})):
        optimizer = optimizer_of(kind, [parameter], **options)
        for _ in range(3):
            parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        state = optimizer.state[parameter]
        moments = moments_of(optimizer, state)
        before = Before(parameter=parameter.detach(), gradient=parameter.grad, state=moments, step=step_of(state))
        rule = rule_of(optimizer, optimizer.param_groups[0])
        value = rule.replay(before, EXACT).value
        names = []
        for name, wrong in variants(rule):
            names.append(name)
            if name != "dampening=0":  # as it is
                assert not torch.allclose(wrong.replay(before, EXACT).value, value, rtol=1e-9, atol=0), name
        assert len(set(names)) == len(names)


def train(model: nn.Module, optimizer: Optimizer, path: Path, *, steps: int = 3, **options: Any) -> None:
    with traindiff.record(path, model, optimizer, observe="replay", strict=True, **options):
        for batch in batches(steps):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_three_steps_are_replayed_and_then_one_in_a_hundred(tmp_path: Path) -> None:
    model = nn.Linear(8, 2, bias=False)
    train(model, SGD(model.parameters(), lr=1e-3), tmp_path / "run", steps=205, every=2)

    assert [seen.step for seen, _ in rows(tmp_path / "run", stage="residual")] == [0, 2, 4, 104, 204]


@pytest.mark.parametrize("every", [1, 2])
def test_what_has_no_room_takes_its_turn_and_is_said_until_then(every: int) -> None:
    parameters = [nn.Parameter(torch.randn(size)) for size in (100, RANGE + 500, 300)]
    optimizer = SGD(parameters, lr=0.1)
    sink = Sink()
    capacity = RANGE * 8 * every
    held = [(0, parameter, (Piece(path=path),)) for path, parameter in zip("abc", parameters, strict=True)]
    tap = OptimizerReplayTap(
        optimizer, name="o", held=lambda: held, selects=lambda path: True, sink=sink,
        capacity_bytes=capacity,
    )  # fmt: skip
    with tap.attach():
        for step in range(3):
            sink.progress.steps["o"] = step
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            before = sum(sum(one.values()) for one in sink.emitted)
            optimizer.step()
            assert (sum(sum(one.values()) for one in sink.emitted) - before) * 8 <= capacity
            assert not tap._copied

    covered = [set(one) for one in sink.emitted]
    assert set.union(*covered) == {"a", "b", "c"}
    assert [{*one, *left} for one, left in zip(sink.emitted, sink.left_out, strict=True)] == [{"a", "b", "c"}] * 3
    assert sum(one.get("b", 0) for one in sink.emitted) >= RANGE


def test_it_is_closer_to_the_step_than_the_tap_around_it() -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = SGD([parameter], lr=1.0)
    seen: list[float] = []

    class Watching(Sink):
        def emit(self, tensor: Tensor, *, stage: str, **_: Any) -> None:
            if stage in ("replayed", "taken"):
                seen.append(tensor.item())

    def around() -> ExitStack:
        optimizer.register_step_pre_hook(lambda *_: setattr(parameter, "grad", torch.full((1,), 3.0)))
        optimizer.register_step_post_hook(lambda *_: setattr(parameter, "data", torch.full((1,), 7.0)))
        return ExitStack()

    held = [(0, parameter, (Piece(path="a"),))]
    tap = OptimizerReplayTap(
        optimizer, name="o", held=lambda: held, selects=lambda path: True, sink=Watching()
    )  # fmt: skip
    parameter.grad = torch.ones(1)
    with tap.attach(around=around):
        optimizer.step()

    assert seen == [-3.0, -3.0]


def test_a_large_parameter_is_replayed_range_by_range(tmp_path: Path) -> None:
    model = nn.Linear(8, RANGE // 8 + 100, bias=False)
    train(model, AdamW(model.parameters()), tmp_path / "run")

    shards = [seen.shard for seen, _ in rows(tmp_path / "run", stage="residual")]
    assert [(shard.start, shard.size) for shard in shards] == [(0, RANGE), (RANGE, 800), (0, RANGE)]
    assert {shard.global_shape for shard in shards} == {(RANGE // 8 + 100, 8)}


def test_an_unknown_optimizer_is_said_once(tmp_path: Path) -> None:
    TRAININGS["lbfgs_with_a_closure"](
        lambda *args: traindiff.record(tmp_path / "run", *args, observe="replay", strict=True)
    )

    reason = "not replayed: no formula is known for LBFGS"
    assert unobserved(tmp_path / "run") == [("optimizer", "LBFGS", reason)]


def test_sparse_gradients_and_complex_parameters_are_said(tmp_path: Path) -> None:
    TRAININGS["sparse_gradients"](
        lambda *args: traindiff.record(tmp_path / "sparse", *args, observe="replay", strict=True)
    )
    assert unobserved(tmp_path / "sparse") == [("0.weight", "SGD", "not replayed: the gradient is sparse_coo")]

    model = nn.Module()
    model.z = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "complex", model, optimizer, observe="replay", strict=True):
        model.z.abs().sum().backward()
        optimizer.step()
    assert unobserved(tmp_path / "complex") == [("z", "SGD", "not replayed: the parameter is complex64")]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, while it compiles
def test_a_compiled_optimizer_is_said_and_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    optimizer = AdamW(model.parameters())
    step = torch.compile(optimizer.step, backend="eager")
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for batch in batches(2):
            model(batch).square().mean().backward()
            step()

    assert unobserved(tmp_path / "run") == [("optimizer", "AdamW", "not replayed: the optimizer's step is compiled")]


def test_a_closure_gives_the_gradients_that_are_replayed(tmp_path: Path) -> None:
    for name in ("plain", "step_with_a_closure"):
        TRAININGS[name](
            lambda *args, name=name: traindiff.record(tmp_path / name, *args, observe="replay", strict=True)
        )

    expected, actual = (
        {(seen.step, seen.path, seen.stage, bytes(summary)) for seen, summary in rows(tmp_path / name)}
        for name in ("plain", "step_with_a_closure")
    )
    assert actual == expected


@pytest.mark.parametrize("overflow", [False, True])
def test_a_fused_optimizer_that_unscales_is_replayed(overflow: bool, tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    optimizer = AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for batch in batches(2):
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean() * (float("inf") if overflow else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()

    found = rows(tmp_path / "run", stage="residual")
    assert all(max(-summary["minimum"], summary["maximum"]) <= 1.0 for _, summary in found)
    if not overflow:
        assert len(found) == 4
        assert row(tmp_path / "run", stage="replayed", path="weight", step=0)[1]["zero"] == 0


def test_a_subclass_with_a_step_of_its_own_is_held_against_its_base() -> None:
    class Mine(AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            pass

    class Same(AdamW):
        pass

    parameters = [nn.Parameter(torch.ones(1))]
    names = [rule_name(kind(parameters)) for kind in (SGD, Adam, AdamW, Same, Mine, torch.optim.RMSprop)]
    assert names == ["SGD", "Adam", "AdamW", "AdamW", "Mine(AdamW)", ""]


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_training_is_bitwise_the_same_with_replays(kind: type[Optimizer], tmp_path: Path) -> None:
    def outcome(path: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp()
        optimizer = optimizer_of(kind, model.parameters(), lr=0.01)
        if path is None:
            for batch in batches(5):
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            train(model, optimizer, path, steps=5)
        return [*model.parameters(), *(one for s in optimizer.state.values() for one in s.values() if one is not None)]

    for plain, recorded in zip(outcome(None), outcome(tmp_path / "run"), strict=True):
        assert torch.equal(plain, recorded)


class Progress:
    observing = True
    evaluation = 0

    def __init__(self) -> None:
        self.steps: dict[str, int] = {}


class Sink:
    """Counts elements by path and step."""

    def __init__(self) -> None:
        self.progress: Any = Progress()
        self.emitted: list[dict[str, int]] = [{} for _ in range(3)]
        self.left_out: list[set[str]] = [set() for _ in range(3)]

    def emit(self, tensor: Tensor, *, path: str, **_: Any) -> None:
        self.emitted[self.progress.steps["o"]][path] = tensor.numel()

    def unobserved(self, _reason: str, *, path: str, **_: Any) -> None:
        self.left_out[self.progress.steps["o"]].add(path)

    def guarded(self, _tap: str, hook: Callable[..., None]) -> Callable[..., Any]:
        return lambda *args: hook(*args)
