"""Train a model compiled in some way, with and without a recording, and eagerly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import SGD

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.observe.hooks.trainings import Outcome, final_state, gradients
from tests.observe.hooks.trainings import batches as some_batches

Compile = Callable[[nn.Module, str], Callable[..., Any]]
Key = tuple[int, int, str, str, str, str, int]


def eager(model: nn.Module, _backend: str) -> Callable[..., Any]:
    return model


def whole(model: nn.Module, backend: str) -> Callable[..., Any]:
    return torch.compile(model, backend=backend)


def full_graph(model: nn.Module, backend: str) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, fullgraph=True)


def dynamic(model: nn.Module, backend: str) -> Callable[..., Any]:
    return torch.compile(model, backend=backend, dynamic=True)


def method(model: nn.Module, backend: str) -> Callable[..., Any]:
    model.compile(backend=backend)
    return model


def function(model: nn.Module, backend: str) -> Callable[..., Any]:
    return torch.compile(lambda *args: model(*args), backend=backend, fullgraph=True)


def per_layer(model: Any, backend: str) -> Callable[..., Any]:
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


@dataclass(kw_only=True)
class Case:
    """One training."""

    build: Callable[[], nn.Module]
    backend: str = "aot_eager"
    recorded: str = "before"  # or "after": compiling; or "late": after the first calls
    batches: list[Tensor] = field(default_factory=lambda: list(some_batches()))
    logits: Callable[[Any], Tensor] = lambda output: output
    autocast: bool = False
    micro_batches: int = 1
    after_step: Callable[[Callable[..., Any]], None] = lambda call: None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Result:
    outcome: Outcome
    graphs: int
    breaks: int


def train(case: Case, compile_: Compile, path: Path | None) -> Result:
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    model = case.build()
    optimizer = SGD(model.parameters(), lr=0.1)
    outcome: Outcome = {}

    def observe() -> Any:
        return (
            traindiff.record(path, model, optimizer, strict=True, overwrite=True, **case.options)
            if path
            else nullcontext()
        )

    before = observe() if case.recorded == "before" else nullcontext()
    call = compile_(model, case.backend)
    if case.recorded == "late":
        for batch in case.batches[:2]:
            case.logits(call(batch)).sum().backward()
        optimizer.zero_grad()
        counters.clear()
    with before, observe() if case.recorded != "before" else nullcontext():
        for step, batch in enumerate(case.batches):
            for part in batch.chunk(case.micro_batches):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.autocast):
                    loss = case.logits(call(part)).float().square().sum() / len(batch)
                loss.backward()
                outcome[f"step {step} loss {len(outcome)}"] = loss.detach().clone()
            outcome |= gradients(model, step)
            optimizer.step()
            optimizer.zero_grad()
            case.after_step(call)
    outcome |= final_state(model, optimizer)
    return Result(
        outcome=outcome, graphs=counters["stats"]["unique_graphs"], breaks=sum(counters["graph_break"].values())
    )


def seen(path: Path) -> tuple[Counter[Key], dict[Key, tuple[int, str]]]:
    """How often each site was written, and its fingerprint and why it was not observed."""
    times: Counter[Key] = Counter()
    values = {}
    for one, summary in rows(path):
        key = (one.step, one.micro_step, one.phase, one.stage, one.path, one.slot, one.call)
        times[key] += 1
        values[key] = (int(summary["fingerprint"]), one.unobserved)
    return times, values


def assert_seen_as_in_eager_mode(case: Case, compile_: Compile, tmp_path: Path) -> Result:
    """Recorded compiled training computes the same, without a graph more, and shows the eager numbers."""
    plain = train(case, compile_, None)
    recorded = train(case, compile_, tmp_path / "compiled")
    train(case, eager, tmp_path / "eager")

    assert_bitwise_equal(recorded.outcome, plain.outcome)
    assert recorded.breaks == plain.breaks
    assert_same_observations(tmp_path)
    if case.recorded != "late" and not plain.breaks:  # late: what was there is compiled anew
        assert recorded.graphs == plain.graphs
    return recorded


def assert_same_observations(tmp_path: Path, *, ignore: Iterable[str] = ()) -> None:
    times, actual = seen(tmp_path / "compiled")
    expected_times, expected = seen(tmp_path / "eager")
    for key in [*times, *expected_times]:
        if key[3] in ignore:
            times.pop(key, None)
            expected_times.pop(key, None)
    assert set(times.values()) == {1}
    assert times == expected_times
    assert {key: actual[key] for key in times} == {key: expected[key] for key in times}
    assert traindiff.compare(str(tmp_path / "eager"), str(tmp_path / "compiled")).verdict == "identical"


torch_may_warn = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",
    "ignore:Profiler record function:UserWarning",
)
"""Of what torch does by itself while it compiles."""
