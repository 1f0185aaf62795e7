"""Without activations, compiled code is the training's own, and nothing is compiled only because of a tap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch.optim import AdamW

import traindiff
from tests.observe.compile.compiling import Case, Compile, method, per_layer, torch_may_warn, train, whole
from tests.observe.compile.models import WIDTH, BreakingNet, Net, Tokens
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.observe.hooks.trainings import batches

NO_ACTIVATION = [["grad"], ["batch", "loss", "grad.micro", "grad.stages", "optimizer", "update", "replay"]]


class Stacked(nn.Module):
    """A model that calls a `Sequential` and a layer, each compiled by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, WIDTH))
        self.layers = nn.ModuleList([self.body, nn.Linear(WIDTH, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def graphs_of(build: Callable[[], nn.Module], compile_: Compile, path: Path | None, observe: list[str]) -> list[str]:
    """The operators of the forward and backward graphs that are compiled in a few steps, in order.

    The inputs of a graph may be in another order: torch passes a tensor to hooks before it comes to the parameters.
    """
    found: list[str] = []

    def note(graph: Any, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        return make_boxed_func(graph.forward)

    def backend(graph: Any, inputs: Any) -> Any:
        return aot_module_simplified(graph, inputs, fw_compiler=note)

    torch.compiler.reset()
    torch.manual_seed(0)
    model = build()
    optimizer = AdamW(model.parameters())
    call: Any = compile_(model, backend)  # type: ignore[arg-type]  # torch takes functions, too
    run = None if path is None else traindiff.record(path, model, optimizer, observe=observe, strict=True)
    for batch in batches():
        call(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if run is not None:
        run.close()
    return found


@torch_may_warn
@pytest.mark.parametrize("observe", NO_ACTIVATION, ids=" ".join)
@pytest.mark.parametrize(
    ("build", "compile_"),
    [(Net, whole), (Net, per_layer), (BreakingNet, whole), (Stacked, method)],
)
def test_without_activations_compiled_code_has_the_operators_of_a_training_without_a_recording(
    build: Callable[[], nn.Module], compile_: Compile, observe: list[str], tmp_path: Path
) -> None:
    plain, recorded = (graphs_of(build, compile_, path, observe) for path in (None, tmp_path / "run"))

    assert plain
    assert recorded == plain


@torch_may_warn
@pytest.mark.parametrize(("build", "compile_"), [(sequential, method), (Stacked, per_layer)])
def test_what_torch_runs_uncompiled_is_not_compiled_for_a_recording(
    build: Callable[[], nn.Module], compile_: Compile, tmp_path: Path
) -> None:
    """torch ignores `compile()` of a module of `torch.nn` unless the module has hooks."""
    case = Case(build=build, backend="inductor")

    plain, recorded = train(case, compile_, None), train(case, compile_, tmp_path / "run")

    assert recorded.graphs == plain.graphs
    assert_bitwise_equal(recorded.outcome, plain.outcome)


def test_hooks_of_the_training_count_as_before(tmp_path: Path) -> None:
    """What torch compiles because of them is compiled with and without a recording."""

    def hooked() -> nn.Module:
        model = sequential()
        model.register_forward_hook(lambda *_: None)
        return model

    plain, recorded = (train(Case(build=hooked), method, path) for path in (None, tmp_path / "run"))

    assert recorded.graphs == plain.graphs > 0


def test_functions_of_torch_are_as_they_were_after_a_recording(tmp_path: Path) -> None:
    from torch._dynamo import utils

    before = utils.nnmodule_has_hooks
    model = Tokens()
    with traindiff.record(tmp_path / "run", model, AdamW(model.parameters())):
        assert utils.nnmodule_has_hooks is not before
    assert utils.nnmodule_has_hooks is before
