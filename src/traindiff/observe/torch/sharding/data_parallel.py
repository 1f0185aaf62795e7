"""Which ranks share the batch: the samples that this one sees are rows of the global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn

from traindiff.core.torch_compat.training import localized_layout
from traindiff.observe.torch.sharding.distributed_tensor import MeshAxis, is_distributed, mesh_of
from traindiff.observe.torch.sharding.registry import ENGINES

BY_HAND = "by hand"
"""Engine of models that say nothing of why there are several ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """This rank's place among those that each have a part of the batch.

    Attributes:
        rank: Its number among them.
        size: How many there are.
        engine: What divides the batch, e.g. `DistributedDataParallel`; empty for a single process.
        alike: How many ranks work on the same samples, because they divide the model or each sample; 1 where each
            has its own.
        part: Which part of each sample this rank has, of as many as `parts` says: of its sequence, e.g.
    """

    rank: int = 0
    size: int = 1
    engine: str = ""
    alike: int = 1
    part: int = 0
    parts: int = 1

    @property
    def term(self) -> int:
        """This rank's number among those that each have a term of the loss."""
        return self.rank * self.parts + self.part

    @property
    def num_terms(self) -> int:
        """How many terms the loss has."""
        return self.size * self.parts

    @property
    def factor(self) -> float:
        """What gradients before the reduction, which averages, are multiplied by, relative to the global batch's."""
        return float(self.num_terms)

    def to_json(self) -> dict[str, Any] | None:
        """For `run.json`; None for a single process."""
        if not self.engine:
            return None
        found: dict[str, Any] = {"data_parallel": self.size, "engine": self.engine}
        if self.parts > 1:
            found["context_parallel"] = self.parts
        if self.alike > self.parts:
            found["model_parallel"] = self.alike // self.parts
        return found


def find_data_parallel(
    model: nn.Module, *, model_axes: Sequence[MeshAxis] = (), sample_axes: Sequence[MeshAxis] = ()
) -> DataParallel:
    """How the batch is divided, as far as the model tells.

    DistributedDataParallel, both FSDPs and DeepSpeed's engine know their process groups. A model with
    tensor-parallel parameters only is given the same batch on all ranks of their mesh. Any other model on several
    ranks is taken as data-parallel over all of them, by hand or by an optimizer that shards its state.

    Args:
        model: The root module.
        model_axes: Axes over which the model is divided, as the user declared them: along them, ranks work on the
            same samples.
        sample_axes: The same for axes over which each sample is divided: there, ranks have terms of the loss.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return DataParallel()
    ranks, engine = _ranks_and_engine(model)
    axes = [*model_axes, *sample_axes]
    if engine == BY_HAND and (axis := _tensor_axis(model)) is not None:
        engine, axes = "tensor parallel", [*axes, axis]
    size, rank = len(ranks), ranks.index(distributed.get_rank())
    within = {axis.ranks: [ranks.index(one) for one in axis.ranks] for axis in axes if {*axis.ranks} <= {*ranks}}
    for numbers in sorted(within.values(), key=lambda numbers: numbers[-1] - numbers[0], reverse=True):
        rank, size = without(rank, numbers), size // len(numbers)
    part, parts = 0, 1
    for axis in sample_axes:
        part, parts = part * axis.size + axis.index, parts * axis.size
    divided = axes or _tensor_axis(model) is not None
    alike = distributed.get_world_size() // size if divided else 1
    return DataParallel(rank=rank, size=size, engine=engine, alike=alike, part=part, parts=parts)


def _ranks_and_engine(model: nn.Module) -> tuple[Sequence[int], str]:
    """The ranks over which gradients are reduced, in order, and by what."""
    for engine in ENGINES:
        if (ranks := engine.reducing_ranks(model)) is not None:
            return ranks, engine.name
    return range(distributed.get_world_size()), BY_HAND


def _tensor_axis(model: nn.Module) -> MeshAxis | None:
    """The ranks over which parameters are divided, if they are DTensors, or stand for ones."""
    for parameter in model.parameters():
        layout = localized_layout(parameter)
        if layout is not None or is_distributed(parameter):
            ranks = (mesh_of(parameter) if layout is None else layout.mesh).mesh.flatten().tolist()
            return MeshAxis(ranks=tuple(ranks), index=ranks.index(distributed.get_rank()))
    return None


def without(rank: int, axis: Sequence[int]) -> int:
    """Number of a rank among those of a mesh that lacks one of its axes.

    Args:
        rank: Number of the rank in the whole mesh, in which the last axis counts fastest.
        axis: Numbers of the ranks along the axis that is left out, this one among them.
    """
    size = len(axis)
    step = axis[1] - axis[0] if size > 1 else 1
    return rank // (step * size) * step + rank % step
