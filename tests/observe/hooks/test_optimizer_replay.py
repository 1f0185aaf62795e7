"""Replays agree with torch, cost what they say, and disturb nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import row, rows, unobserved
from tests.observe.hooks.trainings import TRAININGS, batches
from traindiff.core.shards import Piece
from traindiff.observe.torch.hooks import optimizer_replay
from traindiff.observe.torch.hooks.optimizer_replay import OptimizerReplayTap
from traindiff.observe.torch.replay.copying import RANGE, WHOLE


def optimizer_of(kind: type[Optimizer], parameters: Any, **options: Any) -> Optimizer:
    return kind(parameters, **options)  # type: ignore[call-arg]


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


class Unknown(Optimizer):
    """Adds a thousandth."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1.0})

    @torch.no_grad()
    def step(self, _closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(1.001)


def test_an_unknown_optimizer_is_said_once(tmp_path: Path) -> None:
    model = mlp()
    train(model, Unknown(model.parameters()), tmp_path / "run")

    assert unobserved(tmp_path / "run") == [("optimizer", "Unknown", "not replayed: no formula is known for Unknown")]


def largest_residual(path: Path) -> float:
    found = rows(path, stage="residual")
    assert found
    return max(max(-summary["minimum"], summary["maximum"]) for _, summary in found)


SPARSE: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SparseAdam, {}), (torch.optim.SparseAdam, {"maximize": True}), (torch.optim.Adagrad, {}),
    (SGD, {"lr": 0.1}), (SGD, {"lr": 0.1, "momentum": 0.9}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own
@pytest.mark.parametrize(("kind", "options"), SPARSE)
def test_rows_with_sparse_gradients_are_replayed_and_others_rest(
    kind: Any, options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(300, 7, sparse=True)
    optimizer = kind(model.parameters(), **options)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for _ in range(3):
            model(torch.randint(300, (50,))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert unobserved(tmp_path / "run") == []
    assert largest_residual(tmp_path / "run") <= 1.0
    _, first = row(tmp_path / "run", stage="replayed", step=0)
    assert 0 < first["zero"] < first["count"]
    if kind is torch.optim.SparseAdam:  # its moments alone move no row
        _, last = row(tmp_path / "run", stage="replayed", step=2)
        assert last["zero"] > 250 * 7


class OtherRate(SGD):
    """Uses a multiple of its learning rate."""

    factor = 1.0

    def step(self, closure: Any = None) -> Any:
        rate = self.param_groups[0]["lr"]
        self.param_groups[0]["lr"] = rate * self.factor
        super().step(closure)
        self.param_groups[0]["lr"] = rate


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch's own
@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_rows_that_a_sparse_gradient_holds_several_times_are_added_one_by_one(factor: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(10, 7, sparse=True)
    optimizer = OtherRate(model.parameters(), lr=0.1)
    optimizer.factor = factor
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for _ in range(3):
            model(torch.randint(10, (400,))).square().sum().mul(1e-3).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert (largest_residual(tmp_path / "run") <= 1.0) == (factor == 1.0)


@pytest.mark.parametrize("kind", [SGD, AdamW, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD])
def test_complex_parameters_are_replayed_as_pairs_of_real_numbers(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.z = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))
    optimizer = kind(model.parameters(), lr=0.01)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for _ in range(3):
            (model.z * torch.randn(3, 5)).abs().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert {seen.shard.global_shape for seen, _ in rows(tmp_path / "run", stage="residual")} == {(3, 5, 2)}
    assert largest_residual(tmp_path / "run") <= 1.0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("kind", [SGD, AdamW, torch.optim.RAdam])
def test_a_compiled_step_is_replayed(kind: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = kind(model.parameters(), lr=0.01)
    step = torch.compile(optimizer.step, backend="eager")
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for batch in batches(3):
            model(batch).square().mean().backward()
            step()
            optimizer.zero_grad()

    assert unobserved(tmp_path / "run") == []
    assert len(rows(tmp_path / "run", stage="residual")) == 6
    assert largest_residual(tmp_path / "run") <= 1.0
    assert row(tmp_path / "run", stage="taken", path="weight", step=1)[1]["zero"] == 0


def test_a_parameter_that_is_too_large_for_a_formula_of_whole_ones_is_said(tmp_path: Path) -> None:
    model = nn.Embedding(WHOLE // 8 + 1, 8)
    optimizer = torch.optim.Adafactor(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for _ in range(2):
            model(torch.arange(3)).square().sum().backward()
            optimizer.step()

    (found,) = unobserved(tmp_path / "run")
    reason = "not replayed: Adafactor needs all 4,194,312 elements at once, and at most 4,194,304 are replayed"
    assert found == ("weight", "Adafactor", reason)


def test_matrices_take_turns_if_their_products_cost_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_replay, "WORK", 32 * 32 * 32)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 44, bias=False))
    optimizer = torch.optim.Muon(model.parameters(), lr=0.01)
    with traindiff.record(tmp_path / "run", model, optimizer, observe="replay", strict=True):
        for _ in range(2):
            model(torch.randn(4, 32)).square().sum().backward()
            optimizer.step()

    assert [seen.path for seen, _ in rows(tmp_path / "run", stage="residual")] == ["0.weight", "1.weight"]
    assert largest_residual(tmp_path / "run") <= 1.0


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


@pytest.mark.parametrize("kind", [SGD, AdamW, torch.optim.Adafactor, torch.optim.Rprop])
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

    def number_of(self, optimizer: str) -> int:
        return self.steps.get(optimizer, 0)


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

    def guarded(self, _tap: str, hook: Callable[..., None], **_: object) -> Callable[..., Any]:
        return lambda *args: hook(*args)
