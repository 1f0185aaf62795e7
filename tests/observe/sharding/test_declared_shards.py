"""Plain tensors of which `traindiff.shard` says what ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh

import traindiff
from tests.observe.sharding.by_hand import Model, divided
from tests.observe.sharding.equivalence import assert_equivalent
from tests.observe.sharding.transformer import train
from tests.on_ranks import run_on_ranks
from traindiff.errors import ConfigError, TraindiffWarning


def declared(axis: Any = None) -> Sequence[Any]:
    axis = axis or distributed.group.WORLD
    return [
        traindiff.shard("*.qkv", dim=-1, axis=axis, blocks=3),
        traindiff.shard("*.qkv.*", dim=0, axis=axis, blocks=3),
        traindiff.shard("*.core", dim=2, axis=axis),
        traindiff.shard("*.up", dim=2, axis=axis),
        traindiff.shard("*.act", dim=2, axis=axis),
        traindiff.shard("*.up.*", dim=0, axis=axis),
        traindiff.shard("*.proj", partial=True, axis=axis),
        traindiff.shard("*.down", partial=True, axis=axis),
        traindiff.shard("*.proj.weight", dim=1, axis=axis),
        traindiff.shard("*.down.weight", dim=1, axis=axis),
        traindiff.shard("*", axis=axis),  # all else are copies
    ]


def train_one(path: str) -> None:
    train(path, model=Model)


def train_divided(path: str) -> None:
    train(path, divided, model=Model, shards=declared)


def train_hardly_declared(path: str) -> None:
    """Only the MLP's second part is declared: which axis there is, but not what else is divided along it."""
    train(
        path,
        divided,
        model=Model,
        shards=lambda: [traindiff.shard("*.down.weight", dim=1, axis=distributed.group.WORLD)],
    )


def train_wrongly_declared(path: str) -> None:
    """A weight that is divided by columns is declared as if it were by rows."""
    wrong = [traindiff.shard("*.down.weight", dim=0, axis=distributed.group.WORLD)]
    train(path, divided, model=Model, shards=lambda: [*wrong, *declared()])


def train_with_a_lost_reduction(path: str) -> None:
    """The MLP's output on each rank is that of its own hidden channels alone, in the backward pass."""
    train(path, lose_a_reduction, model=Model, shards=declared)


class Lost(torch.autograd.Function):
    """Forward nothing, backward nothing: the sum over ranks is forgotten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def lose_a_reduction(model: Model) -> Model:
    divided(model)
    model.blocks[1]._copy = Lost.apply
    return model


def problems_of_declarations() -> list[str]:
    """What users write wrong, and what they are told, on one of two ranks."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    group, mesh = distributed.group.WORLD, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    said = []
    for wrong in (
        traindiff.shard("0.weight", dim=2, axis=group),
        traindiff.shard("0.weight", dim=0, axis=group, blocks=4),
        traindiff.shard("0", dim=1, axis="tp"),
        traindiff.shard("0", dim=1, axis=mesh),
        traindiff.shard("0", dim=1, axis=3),
    ):
        try:
            traindiff.record("runs/never", model, shards=[wrong])
        except ConfigError as error:
            said.append(str(error))
    return said


def warnings_of_declarations(path: str) -> list[str]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    shards = [
        traindiff.shard(name, dim=dim, axis=distributed.group.WORLD) for name, dim in (("2", 1), ("1", 3), ("0", 1))
    ]
    with pytest.warns(TraindiffWarning) as caught, traindiff.record(path, model, shards=shards):
        model(torch.ones(2, 4)).sum().backward()
    return [str(warning.message) for warning in caught]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train_one(str(path))
    return path


def test_a_model_that_is_divided_by_hand_is_equivalent_to_one_process(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_divided, 2, str(tmp_path / "run"))

    assert_equivalent(reference, tmp_path / "run")


def test_what_nobody_declared_is_not_observed_and_no_divergence(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_hardly_declared, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(reference, tmp_path / "run")
    assert comparison.verdict == "incomplete", str(comparison)
    assert not comparison.findings
    assert any("traindiff.shard(" in note for note in comparison.notes), comparison.notes


def test_a_wrong_declaration_does_not_pass(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_wrongly_declared, 2, str(tmp_path / "run"))

    first = traindiff.compare(reference, tmp_path / "run").first_divergence
    assert first is not None
    assert (first.step, first.path) == (0, "blocks.0.down.weight")
    assert "has shape [16, 64] in the baseline and [32, 32] in the candidate" in first.message


def test_a_reduction_that_is_missing_between_ranks_is_located(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_with_a_lost_reduction, 2, str(tmp_path / "run"))

    comparison = traindiff.compare(reference, tmp_path / "run")
    first = comparison.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path) == (0, "backward", "blocks.1.norm2"), str(comparison)


def test_declarations_that_cannot_be_are_refused() -> None:
    said = run_on_ranks(problems_of_declarations, 2)[0]

    fix = "    Declare how the rank's own tensor is divided, dims counted from 0."
    axis = '    Give the DeviceMesh of that axis or its process group: axis=mesh["tp"], or axis=group.'
    assert [text.splitlines()[2:] for text in said] == [
        ["  record(shards=...), 0.weight", "    has 2 dims and no dim 2.", fix],
        ["  record(shards=...), 0.weight", "    has length 6 in dim 0: not 4 equal blocks.", fix],
        [
            "  record(shards=...), '0'",
            '    has the axis "tp", but no parameter of the model knows a DeviceMesh.',
            axis,
        ],
        ["  record(shards=...), '0'", "    has as its axis a DeviceMesh with 2 axes.", axis],
        [
            "  record(shards=...), '0'",
            "    has the axis 3, which is no name, no DeviceMesh and no process group.",
            axis,
        ],
    ]


def test_declarations_that_nothing_obeys_are_warned_about(tmp_path: Path) -> None:
    said = run_on_ranks(warnings_of_declarations, 2, str(tmp_path / "run"))[0]

    assert said == [
        'record(shards=...): shard("2", dim=1, axis="ProcessGroup") matches nothing that was observed. '
        "traindiff show RECORDING lists the sites that there are.",
        "record(shards=...): what '1' matches has 2 dims and no dim 3. "
        "traindiff show RECORDING lists the sites that there are.",
    ]


@pytest.mark.parametrize(
    ("shards", "what"),
    [
        ("*.core", "must be a list of declarations."),
        (["*.core"], "has '*.core', which is no declaration."),
        ([traindiff.shard("", dim=1, axis="tp")], "is no pattern over paths of modules or parameters."),
        ([traindiff.shard("*", dim="1", axis="tp")], "has dim='1', which is no dim of a tensor."),
        ([traindiff.shard("*", dim=1, axis="tp", partial=True)], "is partial and has dim=1"),
        ([traindiff.shard("*", dim=1, axis="tp", blocks=0)], "has blocks=0, which is no number of blocks."),
    ],
)
def test_declarations_that_are_none_are_refused(shards: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        traindiff.record(tmp_path / "run", nn.Linear(2, 2), shards=shards)

    assert what in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_in_one_process_nothing_is_declared(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with traindiff.record(tmp_path / "run", model, shards=[traindiff.shard("(root)", dim=1, axis="tp")]):
        model(torch.ones(2, 2)).sum().backward()
