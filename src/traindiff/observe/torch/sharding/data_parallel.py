"""How ranks share the batch: data-parallel ranks have rows of it, and the stages of a pipeline share these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import distributed, nn

from traindiff.core.observation import BY_HAND
from traindiff.core.site import canonical_path, enclosing
from traindiff.core.torch_compat.training import (
    has_communication_hook,
    localized_layout,
    modules_by_name,
    num_chunks_of,
    parameters_in,
)
from traindiff.observe.torch.sharding.declarations import Declarations
from traindiff.observe.torch.sharding.distributed_tensor import MeshAxis, is_distributed, mesh_of
from traindiff.observe.torch.sharding.registry import ENGINES


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline, as one of its ranks knows it.

    Attributes:
        schedule: Class of the schedule.
        num_stages: Number of stages of the model.
        stages: Numbers of the stages of this rank.
        ranks: The rank of each stage.
        num_chunks: Number of micro-batches of the schedule.
        scales_gradients: Whether the schedule divides the gradients of parameters by `num_chunks` at its end.
    """

    schedule: str
    num_stages: int
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    num_chunks: int
    scales_gradients: bool

    @property
    def factor(self) -> float:
        """Factor that gradients contain until the schedule divides by it."""
        return float(self.num_chunks) if self.scales_gradients else 1.0

    def to_json(self) -> dict[str, Any]:
        """For `rank.json`."""
        return {"num_stages": self.num_stages, "stages": list(self.stages), "ranks": list(self.ranks)}


def find_pipeline(schedule: Any, stages: Sequence[Any]) -> Pipeline:
    """The pipeline that a schedule runs.

    Args:
        schedule: A schedule of `torch.distributed.pipelining`.
        stages: Its stages on this rank.
    """
    of_group = distributed.get_process_group_ranks(stages[0].group or distributed.group.WORLD)
    places = stages[0].stage_index_to_group_rank
    num_stages = stages[0].num_stages
    return Pipeline(
        schedule=type(schedule).__qualname__,
        num_stages=num_stages,
        stages=tuple(sorted(stage.stage_index for stage in stages)),
        ranks=tuple(of_group[places[number]] for number in range(num_stages)),
        num_chunks=num_chunks_of(schedule),
        scales_gradients=bool(getattr(schedule, "scale_grads", False)),  # torch releases without it did not scale
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """This rank's place among the ranks that each have a part of the batch.

    Attributes:
        rank: Its number among them.
        size: Number of these ranks.
        engine: The engine that divides the batch, e.g. `DistributedDataParallel`; empty for a single process.
        alike: Number of ranks that work on the same samples, because they divide the model or each sample.
        part: Number of this rank's part of each sample, e.g. of its sequence, among `parts`.
        parts: Number of parts of each sample.
        pipeline: The pipeline of this rank, if it has stages of one.
        has_hook: Whether a communication hook replaces the reduction of gradients.
        divisor: The number by which gradients that were added up over ranks are divided; None for `num_terms`.
        divisors: By path of a module: the same for the parameters in it, where it is not the same for all modules.
    """

    rank: int = 0
    size: int = 1
    engine: str = ""
    alike: int = 1
    part: int = 0
    parts: int = 1
    pipeline: Pipeline | None = None
    has_hook: bool = False
    divisor: float | None = None
    divisors: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def term(self) -> int:
        """This rank's number among the ranks that each have a term of the loss."""
        return self.rank * self.parts + self.part

    @property
    def num_terms(self) -> int:
        """Number of terms of the loss."""
        return self.size * self.parts

    @property
    def factor(self) -> float:
        """Factor in gradients before the reduction, which divides by it, relative to those of the global batch."""
        return self._factor(self.divisor)

    def factor_of(self, path: str) -> float:
        """`factor` in the gradient of a parameter."""
        if not self.divisors:
            return self.factor
        module = next((one for one in enclosing(path)[1:] if one in self.divisors), None)
        return self.factor if module is None else self._factor(self.divisors[module])

    @property
    def is_whole(self) -> bool:
        """True if no gradient contains a factor."""
        return not self.divisors and self.factor == 1.0

    def _factor(self, divisor: float | None) -> float:
        within = 1.0 if self.pipeline is None else self.pipeline.factor
        return float(self.num_terms if divisor is None else divisor) * within

    def to_json(self) -> dict[str, Any] | None:
        """For `run.json`; None for a single process."""
        if not self.engine:
            return None
        found: dict[str, Any] = {"data_parallel": self.size, "engine": self.engine}
        if self.has_hook:
            found["communication_hook"] = True
        if self.divisor is not None:
            found["gradient_divisor"] = self.divisor
        if self.parts > 1:
            found["context_parallel"] = self.parts
        if self.alike > self.parts:
            found["model_parallel"] = self.alike // self.parts
        if self.pipeline is not None:
            found["pipeline"] = self.pipeline.num_stages
            found["schedule"] = self.pipeline.schedule
            found["micro_batches"] = self.pipeline.num_chunks
            found["scales_gradients"] = self.pipeline.scales_gradients
        return found


class Divisors:
    """Reads by which numbers an engine divides gradients that it has added up over ranks.

    Args:
        model: The root module.
    """

    def __init__(self, model: nn.Module) -> None:
        self._readers = {
            canonical_path(name): read
            for name, module in modules_by_name(model).items()
            for engine in ENGINES
            if (read := engine.divisor(module)) is not None
        }
        self._latest: tuple[float | None, ...] = ()

    def read(self, data: DataParallel) -> DataParallel:
        """The place among ranks with the numbers that the training has set by now; `data` itself if none is new."""
        found = tuple(read() for read in self._readers.values())
        if found == self._latest:
            return data
        self._latest = found
        each = {} if len({*found}) == 1 else dict(zip(self._readers, found, strict=True))
        return replace(data, divisor=found[0], divisors=each)  # outside of modules that differ, that of the outermost


def find_data_parallel(model: nn.Module, declared: Declarations, pipeline: Pipeline | None = None) -> DataParallel:
    """How the batch is divided, as far as the model shows it.

    DistributedDataParallel, both FSDPs and DeepSpeed's engine know their process groups. A model with only
    tensor-parallel parameters gets the same batch on all ranks of their mesh. Any other model on several ranks is
    taken as data-parallel over all of them: by hand, or by an optimizer that shards its state.

    Args:
        model: The root module.
        declared: The user's declarations. Ranks along an axis over which the model is divided work on the same samples;
            ranks along one over which each sample is divided have terms of the loss.
        pipeline: The pipeline of this rank, if it has stages of one: its ranks share the batch.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return DataParallel()
    ranks, engine = _ranks_and_engine(model)
    stages = () if pipeline is None else tuple(sorted(set(pipeline.ranks)))
    pipelines = [MeshAxis(ranks=stages, index=stages.index(distributed.get_rank()))] if stages else []
    sample_axes = declared.axes(of_samples=True)
    axes = [*declared.axes(of_samples=False), *pipelines, *sample_axes]
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
    if stages:
        alike = max(1, alike // len(stages))  # ranks with other stages have other tensors
        engine = "pipeline" if engine == BY_HAND and size == 1 else engine
    return DataParallel(
        rank=rank, size=size, engine=engine, alike=alike, part=part, parts=parts, pipeline=pipeline,
        has_hook=has_communication_hook(model),
    )  # fmt: skip


def _ranks_and_engine(model: nn.Module) -> tuple[Sequence[int], str]:
    """The ranks over which gradients are reduced, in order, and the name of the engine."""
    for engine in ENGINES:
        if (ranks := engine.reducing_ranks(model)) is not None:
            return ranks, engine.name
    return range(distributed.get_world_size()), BY_HAND


def _tensor_axis(model: nn.Module) -> MeshAxis | None:
    """The ranks over which parameters are divided, if they are DTensors or local parts of DTensors."""
    for parameter in parameters_in(model):
        layout = localized_layout(parameter)
        if layout is not None or is_distributed(parameter):
            ranks = (mesh_of(parameter) if layout is None else layout.mesh).mesh.flatten().tolist()
            return MeshAxis(ranks=tuple(ranks), index=ranks.index(distributed.get_rank()))
    return None


def without(rank: int, axis: Sequence[int]) -> int:
    """Number of a rank in its mesh after one axis is left out.

    Args:
        rank: Number of the rank in the whole mesh, in which the last axis counts fastest.
        axis: Numbers of the ranks along that axis, this one among them.
    """
    size = len(axis)
    step = axis[1] - axis[0] if size > 1 else 1
    return rank // (step * size) * step + rank % step
