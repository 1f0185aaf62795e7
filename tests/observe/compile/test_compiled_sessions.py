"""Recordings that begin and end while compiled training goes on, and what cannot be seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import config
from torch._dynamo.utils import counters
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam

import traindiff
from tests.observe.compile.compiling import (
    Compile,
    assert_same_observations,
    eager,
    full_graph,
    per_layer,
    torch_may_warn,
    whole,
)
from tests.observe.compile.models import Net
from tests.observe.hooks.reading import rows, unobserved
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.observe.hooks.trainings import Outcome, batches, final_state
from traindiff.core.site import PHASES
from traindiff.observe.torch.hooks import compiled
from traindiff.observe.torch.hooks.module_outputs import SCRIPTED
from traindiff.storage import open_recording

pytestmark = torch_may_warn

SITES = 12
"""Outputs of a `Net`: two layers of five modules, the head, the root."""


def step(call: Callable[..., Any], optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
    loss = call(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def build(compile_: Compile = full_graph) -> tuple[nn.Module, torch.optim.Optimizer, Callable[..., Any]]:
    torch.manual_seed(0)
    model = Net()
    return model, SGD(model.parameters(), lr=0.1), compile_(model, "aot_eager")


def sites(path: Path) -> int:
    return len({(one.path, one.slot) for one, _ in rows(path, phase="forward")})


@pytest.mark.parametrize("compile_", [full_graph, per_layer])
def test_training_goes_on_unobserved_and_undisturbed_when_a_recording_is_closed(
    compile_: Compile, tmp_path: Path
) -> None:
    outcomes: list[Outcome] = []
    for recorded in (True, False):
        torch.compiler.reset()
        model, optimizer, call = build(compile_)
        run = traindiff.record(tmp_path / "run", model, optimizer, strict=True) if recorded else None
        losses = {}
        for number, batch in enumerate(batches(6)):
            if run is not None and number == 3:
                run.close()
                assert (compiled._modules, compiled._calls, compiled._tracing) == ({}, {}, [])
            losses[f"loss {number}"] = step(call, optimizer, batch)
        outcomes.append(losses | final_state(model, optimizer))

    assert_bitwise_equal(*outcomes)
    assert {one.step for one, _ in rows(tmp_path / "run")} == {0, 1, 2}


def test_code_compiled_for_a_recording_that_was_closed_calls_no_operator(tmp_path: Path) -> None:
    model, optimizer, call = build()
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        step(call, optimizer, next(batches()))

    targets: list[str] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., Any]:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    step(torch.compile(model, backend=keep), optimizer, next(batches()))
    step(call, optimizer, next(batches()))

    assert targets
    assert not [target for target in targets if "traindiff" in target]


@pytest.mark.parametrize("compile_", [whole, per_layer])
def test_a_second_recording_of_a_compiled_model_sees_as_much_as_the_first(compile_: Compile, tmp_path: Path) -> None:
    model, optimizer, call = build(compile_)
    step(call, optimizer, next(batches()))
    for name in ("first", "second"):
        with traindiff.record(tmp_path / name, model, optimizer, strict=True):
            step(call, optimizer, next(batches()))

    assert sites(tmp_path / "first") == sites(tmp_path / "second") == SITES


def test_two_recordings_at_once_see_the_same(tmp_path: Path) -> None:
    model, optimizer, call = build()
    outer = traindiff.record(tmp_path / "outer", model, optimizer, strict=True)
    inner = traindiff.record(tmp_path / "inner", model, optimizer, strict=True)
    step(call, optimizer, next(batches()))
    outer.close()
    step(call, optimizer, next(batches()))
    inner.close()

    first, second = (
        [(one.phase, one.path, one.slot, bytes(summary)) for one, summary in rows(tmp_path / name, step=0)]
        for name in ("outer", "inner")
    )
    assert first == second
    assert len({one.path for one, _ in rows(tmp_path / "inner", step=1, phase="backward")}) == SITES


@pytest.mark.parametrize("compile_", [whole, per_layer])
def test_the_code_of_another_model_of_the_same_class_is_not_used(compile_: Compile, tmp_path: Path) -> None:
    """By default torch would: it does not look at hooks when it looks for code to use again."""
    _, teacher_optimizer, teacher = build(compile_)
    student, optimizer, call = build(compile_)
    with traindiff.record(tmp_path / "run", student, optimizer, strict=True):
        for batch in batches(2):
            step(teacher, teacher_optimizer, batch)
            step(call, optimizer, batch)

    assert sites(tmp_path / "run") == SITES
    assert unobserved(tmp_path / "run") == []


def test_the_compilers_settings_are_left_as_they_were(tmp_path: Path) -> None:
    inductor = torch._inductor.config
    assert config.skip_nnmodule_hook_guards
    before = list(inductor.custom_should_partition_ops)
    model, optimizer, _ = build()
    outer = traindiff.record(tmp_path / "outer", model, optimizer)
    inner = traindiff.record(tmp_path / "inner", model, optimizer)
    outer.close()
    assert not config.skip_nnmodule_hook_guards
    assert "traindiff::observe" in inductor.custom_should_partition_ops
    inner.close()
    assert config.skip_nnmodule_hook_guards
    assert inductor.custom_should_partition_ops == before


@pytest.mark.parametrize("optimizer_inside", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_training_step_is_seen_as_an_eager_one(backend: str, optimizer_inside: bool, tmp_path: Path) -> None:
    outcomes: dict[str, Outcome] = {}
    breaks = {}
    for name in ("plain", "compiled", "eager"):
        torch.compiler.reset()
        counters.clear()
        torch.manual_seed(0)
        model = Net()
        optimizer = Adam(model.parameters(), lr=0.01)

        def train_step(batch: Tensor, model: nn.Module = model, optimizer: Adam = optimizer) -> Tensor:
            loss = model(batch).square().mean()
            loss.backward()
            if optimizer_inside:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        call = train_step if name == "eager" else torch.compile(train_step, backend=backend)
        run = None if name == "plain" else traindiff.record(tmp_path / name, model, optimizer, strict=True)
        outcomes[name] = {}
        for number, batch in enumerate(batches()):
            outcomes[name][f"loss {number}"] = call(batch).clone()
            if not optimizer_inside:
                optimizer.step()
                optimizer.zero_grad()
        if run is not None:
            run.close()
        outcomes[name] |= final_state(model)
        breaks[name] = sum(counters["graph_break"].values())

    assert_bitwise_equal(outcomes["compiled"], outcomes["plain"])
    assert breaks["compiled"] == breaks["plain"]
    if not optimizer_inside:
        assert_same_observations(tmp_path)


def test_losses_of_gradients_that_compiled_code_asks_for_are_seen(tmp_path: Path) -> None:
    found = {}
    for name in ("compiled", "eager"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Net()
        optimizer = Adam(model.parameters(), lr=0.01)
        parameters = list(model.parameters())

        def gradients(batch: Tensor, model: nn.Module = model) -> tuple[Tensor, ...]:
            return torch.autograd.grad(model(batch).square().mean(), [*model.parameters()])

        call = gradients if name == "eager" else torch.compile(gradients, backend="eager")
        with traindiff.record(tmp_path / name, model, optimizer, strict=True):
            for batch in batches():
                for parameter, gradient in zip(parameters, call(batch), strict=True):
                    parameter.grad = gradient
                optimizer.step()
        found[name] = [(one.step, one.path, one.slot) for one, _ in rows(tmp_path / name, phase="loss")]
    assert found["compiled"] == found["eager"]
    assert found["eager"]


def test_a_compiled_optimizer_step_is_seen_as_an_eager_one(tmp_path: Path) -> None:
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Net()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        update = torch.compile(optimizer.step, backend="aot_eager") if name == "compiled" else optimizer.step
        with traindiff.record(tmp_path / name, model, optimizer, observe=PHASES, strict=True) as run:
            for number, batch in enumerate(batches()):
                loss = model(batch).square().mean()
                loss.backward()
                update()
                optimizer.zero_grad()
                run.log("train loss", loss)
                assert run.step == number + 1

    assert_same_observations(tmp_path)


ADAPTIVE: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda parameters: AdamW(parameters, lr=0.01),
    "betas": lambda parameters: AdamW(parameters, lr=0.01, betas=(0.95, 0.9999)),
    "RAdam": lambda parameters: RAdam(parameters, lr=0.01),
}


@pytest.mark.parametrize("factor", [1.0, 1.001])
@pytest.mark.parametrize("kind", ADAPTIVE)
def test_bias_corrections_in_float32_are_no_divergence_and_hide_none(kind: str, factor: float, tmp_path: Path) -> None:
    """A compiled optimizer counts its steps in float32; a factor in its updates is a fault."""
    for name in ("eager", "compiled"):
        torch.compiler.reset()
        torch.manual_seed(0)
        model = Net()
        optimizer = ADAPTIVE[kind](model.parameters())
        update = torch.compile(optimizer.step, backend="aot_eager") if name == "compiled" else optimizer.step
        with traindiff.record(tmp_path / name, model, optimizer, strict=True):
            for batch in [*batches(), *batches()]:
                model(batch).square().mean().backward()
                before = [one.detach().clone() for one in model.parameters()]
                update()
                if name == "compiled" and factor != 1.0:
                    with torch.no_grad():
                        for one, old in zip(model.parameters(), before, strict=True):
                            one.add_(one - old, alpha=factor - 1.0)
                optimizer.zero_grad()

    found = traindiff.compare(tmp_path / "eager", tmp_path / "compiled")
    content = open_recording(str(tmp_path / "compiled")).rank_content(0)
    assert content["optimizers"][0]["counts_in_float32"] is True
    assert found.verdict == ("equivalent" if factor == 1.0 else "diverged")
    if found.first_divergence is not None:
        assert (found.first_divergence.step, found.first_divergence.phase) == (0, "update")


class Hidden(nn.Module):
    """Calls a module in a way that no hook sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.unused = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer.forward(x))


def record_hidden(path: Path, *, compile_: Compile | None) -> list[tuple[str, str, str, str]]:
    model = Hidden()
    optimizer = SGD(model.parameters(), lr=0.1)
    call = compile_(model, "aot_eager") if compile_ else model
    with traindiff.record(path, model, optimizer, strict=True):
        for batch in batches():
            step(call, optimizer, batch)
    return [(one.step, one.path, one.slot, one.unobserved) for one, _ in rows(path, phase="forward") if one.unobserved]


def test_a_module_that_compiled_code_hides_is_unobserved_with_the_reason(tmp_path: Path) -> None:
    found = record_hidden(tmp_path / "run", compile_=whole)

    assert [entry[:3] for entry in found] == [(0, "layer", "output[0]")]
    assert "although the root ran and torch.compile was in use" in found[0][3]


def test_a_module_that_is_not_called_is_no_news_without_compiled_code(tmp_path: Path) -> None:
    assert record_hidden(tmp_path / "run", compile_=None) == []


def test_what_is_hidden_is_told_at_the_end_where_no_step_ends(tmp_path: Path) -> None:
    model = Hidden()
    call = torch.compile(model, backend="aot_eager")
    with traindiff.record(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), strict=True):
        call(next(batches())).sum().backward()

    assert [path for path, _, _ in unobserved(tmp_path / "run")] == ["layer"]


def test_modules_that_compiled_code_does_not_call_are_no_news(tmp_path: Path) -> None:
    class Choosing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.rest = nn.Dropout(), nn.ModuleList([nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4)])

        def forward(self, x: Tensor) -> Tensor:
            return self.rest[2](x)

    model = Choosing()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        step(torch.compile(model, backend="aot_eager"), optimizer, next(batches()))

    assert [entry for entry in unobserved(tmp_path / "run") if entry[1] == "output[0]"] == []


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compile_", [eager, whole])
def test_modules_in_torchscript_are_unobserved_and_the_rest_is_seen(compile_: Compile, tmp_path: Path) -> None:
    class Scripted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU())), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner(x))

    model = Scripted()
    optimizer = SGD(model.parameters(), lr=0.1)
    call = compile_(model, "aot_eager")
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for batch in batches(2):
            step(call, optimizer, batch)

    assert unobserved(tmp_path / "run") == [(path, "output[0]", SCRIPTED) for path in ("inner", "inner.0", "inner.1")]
    assert sites(tmp_path / "run") == 2 + 3
