"""Compiled models are seen as eager ones are: every site once, the same numbers, nothing disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.compile.compiling import (
    Case,
    Compile,
    assert_same_observations,
    assert_seen_as_in_eager_mode,
    dynamic,
    eager,
    full_graph,
    function,
    method,
    per_layer,
    seen,
    torch_may_warn,
    train,
    whole,
)
from tests.observe.compile.models import (
    BreakingBlock,
    BreakingLinear,
    BreakingNet,
    CheckpointedNet,
    InspectedNet,
    Narrowing,
    Net,
    Tokens,
    Twice,
)
from tests.observe.hooks.reading import rows, unobserved
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.observe.hooks.trainings import CONTAINERS, Returning, WithTable
from traindiff.observe.torch.hooks.activations import LEAF

pytestmark = torch_may_warn
release = partial(pytest.param, marks=pytest.mark.release)

WAYS: dict[str, Compile] = {
    "torch.compile": whole,
    "fullgraph": full_graph,
    "model.compile": method,
    "per layer": per_layer,
    "a function": function,
}
RECORDED = ["before", "after", "late"]


def cases() -> Iterator[Any]:
    """All combinations; without a release: the first way at all moments, the others at one, with backends in turn."""
    for number, (way, recorded) in enumerate(product(WAYS, RECORDED)):
        for backend in ("eager", "aot_eager"):
            kept = way == "torch.compile" or RECORDED.index(recorded) == list(WAYS).index(way) % 3
            kept &= backend == ("eager", "aot_eager")[number % 2]
            marks = () if kept else pytest.mark.release
            yield pytest.param(backend, recorded, way, marks=marks)


@pytest.mark.parametrize(("backend", "recorded", "way"), list(cases()))
def test_every_way_to_compile_is_seen(way: str, recorded: str, backend: str, tmp_path: Path) -> None:
    case = Case(build=Net, recorded=recorded, backend=backend)

    assert_seen_as_in_eager_mode(case, WAYS[way], tmp_path)


def test_equal_layers_are_compiled_once(tmp_path: Path) -> None:
    result = assert_seen_as_in_eager_mode(Case(build=lambda: Net(12)), per_layer, tmp_path)

    assert result.graphs == 2  # the first layer's input needs no gradient


@pytest.mark.parametrize(
    ("build", "compile_"),
    [
        (BreakingNet, whole),
        (lambda: Net(block=BreakingBlock), whole),
        (lambda: Net(block=BreakingBlock), per_layer),
        (Twice, full_graph),
        (Tokens, full_graph),
        (InspectedNet, full_graph),
        (Narrowing, full_graph),
    ],
)
def test_models_of_every_kind_are_seen(build: Callable[[], nn.Module], compile_: Compile, tmp_path: Path) -> None:
    assert_seen_as_in_eager_mode(Case(build=build), compile_, tmp_path)


@pytest.mark.parametrize(("build", "compile_"), [(Narrowing, per_layer), (lambda: Narrowing(BreakingLinear), whole)])
def test_code_that_torch_gives_up_compiling_is_seen(
    build: Callable[[], nn.Module], compile_: Compile, tmp_path: Path
) -> None:
    case = Case(build=build)
    train(case, compile_, tmp_path / "compiled")
    train(case, eager, tmp_path / "eager")

    assert_same_observations(tmp_path)


@pytest.mark.parametrize("compile_", [whole, release(full_graph), release(dynamic), per_layer])
def test_batches_and_sequences_of_all_lengths_are_seen(compile_: Compile, tmp_path: Path) -> None:
    lengths = ((4, 5), (3, 7), (6, 2), (2, 9))

    assert_seen_as_in_eager_mode(
        Case(build=Net, batches=[torch.randn(*length, 8) for length in lengths]), compile_, tmp_path
    )


@pytest.mark.parametrize("compile_", [full_graph, per_layer])
def test_autocast_is_seen(compile_: Compile, tmp_path: Path) -> None:
    assert_seen_as_in_eager_mode(Case(build=Net, autocast=True), compile_, tmp_path)

    assert {one.dtype for one, _ in rows(tmp_path / "compiled", phase="forward", path="head")} == {"bfloat16"}


@pytest.mark.parametrize("compile_", [full_graph, per_layer])
def test_gradient_accumulation_is_seen(compile_: Compile, tmp_path: Path) -> None:
    assert_seen_as_in_eager_mode(Case(build=Net, micro_batches=3), compile_, tmp_path)

    found = rows(tmp_path / "compiled", phase="backward", path="layers.0", step=1)
    assert [(one.micro_step, one.shard.offset[0]) for one, _ in found] == [(0, 0), (1, 2), (2, 4)]


@pytest.mark.parametrize(
    ("recorded", "compile_"),
    [(True, full_graph), release(True, per_layer), release(False, full_graph), (False, per_layer)],
)
def test_evaluation_is_seen_if_it_is_asked_for(recorded: bool, compile_: Compile, tmp_path: Path) -> None:
    def evaluate(call: Callable[..., Any]) -> None:
        with torch.no_grad():
            call(torch.ones(3, 8))

    case = Case(build=Net, after_step=evaluate, options={"evaluation": recorded})
    assert_seen_as_in_eager_mode(case, compile_, tmp_path)

    evaluated = {one.path for one, _ in rows(tmp_path / "compiled", stage="evaluation", phase="forward")}
    assert ("layers.0.relu" in evaluated) == recorded


@pytest.mark.parametrize(
    ("backend", "container"),
    [
        pytest.param(backend, container, marks=() if position == number % 2 else pytest.mark.release)
        for number, container in enumerate(CONTAINERS)
        for position, backend in enumerate(("eager", "aot_eager"))
    ],
)
def test_containers_are_seen(container: str, backend: str, tmp_path: Path) -> None:
    build, logits = CONTAINERS[container]

    assert_seen_as_in_eager_mode(
        Case(build=lambda: Returning(build), logits=logits, backend=backend), function, tmp_path
    )


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_gradient_that_compiled_code_shows_only_a_part_of_is_unobserved(container: str, tmp_path: Path) -> None:
    build, logits = CONTAINERS[container]
    case = Case(build=lambda: Returning(build), logits=logits)
    train(case, full_graph, tmp_path / "run")

    found = unobserved(tmp_path / "run")
    assert len(found) == 2 * len(case.batches)
    assert {path for path, _, _ in found} == {""}
    assert all("what part of its gradient flows inside that code cannot be seen" in why for _, _, why in found)
    assert len(rows(tmp_path / "run", phase="backward", path="first")) == len(case.batches)


@pytest.mark.parametrize("observe", [None, ["backward", "loss"]])
def test_two_equal_runs_of_compiled_code_that_returns_several_tensors_are_identical(
    observe: list[str] | None, tmp_path: Path
) -> None:
    build, logits = CONTAINERS["namedtuple"]
    options = {} if observe is None else {"observe": observe}
    for name in ("baseline", "candidate"):
        train(Case(build=lambda: Returning(build), logits=logits, options=options), whole, tmp_path / name)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert (comparison.verdict, comparison.exit_code) == ("identical", 0), str(comparison)
    assert any("Not observed, so unknown: backward" in note for note in comparison.notes)
    assert traindiff.check(tmp_path / "candidate").exit_code == 0


def test_recomputation_is_seen_where_it_runs_as_it_was_written(tmp_path: Path) -> None:
    case = Case(build=CheckpointedNet, backend="eager")
    plain, recorded = train(case, full_graph, None), train(case, full_graph, tmp_path / "compiled")
    train(case, eager, tmp_path / "eager")

    assert_bitwise_equal(recorded.outcome, plain.outcome)
    times, values = seen(tmp_path / "compiled")
    assert set(times.values()) == {1}
    repeated = [key for key in times if key[3] == "recomputed"]
    assert {key[4] for key in repeated} >= {"layers.0.norm", "layers.0.up", "layers.0.relu"}
    for key in repeated:
        assert values[key] == values[*key[:3], "", *key[4:]]
    assert_same_observations(tmp_path, ignore=["recomputed"])


@pytest.mark.parametrize("compile_", [full_graph, per_layer])
def test_checkpointing_inside_compiled_code_changes_nothing_else(compile_: Compile, tmp_path: Path) -> None:
    case = Case(build=CheckpointedNet)
    plain, recorded = train(case, compile_, None), train(case, compile_, tmp_path / "compiled")
    train(case, eager, tmp_path / "eager")

    assert_bitwise_equal(recorded.outcome, plain.outcome)
    assert (recorded.breaks, recorded.graphs) == (plain.breaks, plain.graphs)
    assert_same_observations(tmp_path, ignore=["recomputed"])


@pytest.mark.parametrize("compile_", [release(full_graph), per_layer])
def test_inductor_is_seen_and_computes_the_same_bits(compile_: Compile, tmp_path: Path) -> None:
    case = Case(build=Tokens if compile_ is full_graph else Net, backend="inductor")
    plain, recorded = train(case, compile_, None), train(case, compile_, tmp_path / "compiled")
    train(case, eager, tmp_path / "eager")

    assert_bitwise_equal(recorded.outcome, plain.outcome)
    assert (recorded.breaks, recorded.graphs) == (plain.breaks, plain.graphs)
    times, _ = seen(tmp_path / "compiled")
    assert times == seen(tmp_path / "eager")[0]
    assert set(times.values()) == {1}
    assert unobserved(tmp_path / "compiled") == []
    if compile_ is per_layer:  # inductor draws other random numbers
        assert traindiff.compare(str(tmp_path / "eager"), str(tmp_path / "compiled")).verdict == "equivalent"


def test_an_activation_is_seen_before_compiled_code_overwrites_it(tmp_path: Path) -> None:
    train(Case(build=Net), full_graph, tmp_path / "run")

    before, after = (rows(tmp_path / "run", phase="forward", path=f"layers.0.{name}")[0][1] for name in ("up", "relu"))
    assert before["negative"] > 0
    assert after["negative"] == 0


def test_a_name_that_is_inspected_twice_is_numbered(tmp_path: Path) -> None:
    train(Case(build=InspectedNet), full_graph, tmp_path / "run")

    for phase, calls in (("forward", [0, 1]), ("backward", [1, 0])):
        found: list[Tensor] = rows(tmp_path / "run", phase=phase, path="between", step=2)
        assert [one.call for one, _ in found] == calls


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_hooks_do_not_pile_up_on_a_parameter_that_compiled_code_returns(backend: str, tmp_path: Path) -> None:
    case = Case(build=WithTable, backend=backend)
    plain, recorded = train(case, full_graph, None), train(case, full_graph, tmp_path / "run")

    assert_bitwise_equal(recorded.outcome, plain.outcome)
    assert rows(tmp_path / "run", phase="backward", path="positions", unobserved="") == []
    found = rows(tmp_path / "run", phase="backward", path="positions")
    assert [(one.step, one.unobserved) for one, _ in found] == [(0, LEAF), (1, LEAF), (2, LEAF)]
    assert len(rows(tmp_path / "run", phase="forward", path="positions")) == 3
