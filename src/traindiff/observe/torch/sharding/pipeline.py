"""Pipeline parallelism: each rank has some stages of the model, and a schedule divides the batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn

from traindiff.core.torch_compat.training import num_chunks_of
from traindiff.observe.torch.sharding.data_parallel import BY_HAND, DataParallel, find_data_parallel
from traindiff.observe.torch.sharding.distributed_tensor import MeshAxis


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """A pipeline, as one of its ranks knows it.

    Attributes:
        schedule: Class of the schedule.
        num_stages: Into how many stages the model is divided.
        stages: Those of this rank.
        ranks: Which rank has each stage.
        num_chunks: Micro-batches of the schedule.
        scales_gradients: Whether it divides the gradients of parameters by their number when all have run.
    """

    schedule: str
    num_stages: int
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    num_chunks: int
    scales_gradients: bool

    @property
    def factor(self) -> float:
        """What gradients are multiplied by until the schedule divides them."""
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
        scales_gradients=bool(getattr(schedule, "scale_grads", False)),  # releases without it did not scale
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineParallel(DataParallel):
    """This rank's place among those that share the batch, each of which has one stage of a pipeline with it.

    Attributes:
        pipeline: The pipeline that it is in.
    """

    pipeline: Pipeline

    @property
    def factor(self) -> float:
        """See `DataParallel.factor`; the schedule's own division comes on top."""
        return self.num_terms * self.pipeline.factor

    def to_json(self) -> dict[str, Any]:
        """For `run.json`."""
        pipeline = self.pipeline
        return {
            **(DataParallel.to_json(self) or {}),
            "pipeline": pipeline.num_stages,
            "schedule": pipeline.schedule,
            "micro_batches": pipeline.num_chunks,
            "scales_gradients": pipeline.scales_gradients,
        }


def beside_pipeline(
    model: nn.Module,
    pipeline: Pipeline,
    *,
    model_axes: Sequence[MeshAxis] = (),
    sample_axes: Sequence[MeshAxis] = (),
) -> PipelineParallel:
    """How the batch is divided over ranks of which some share it as stages of one pipeline.

    Args:
        model: What this rank has of the model.
        pipeline: The pipeline that it is in.
        model_axes: See `find_data_parallel`.
        sample_axes: See `find_data_parallel`.
    """
    ranks = sorted(set(pipeline.ranks))
    stages = MeshAxis(ranks=tuple(ranks), index=ranks.index(distributed.get_rank()))
    data = find_data_parallel(model, model_axes=[*model_axes, stages], sample_axes=sample_axes)
    return PipelineParallel(
        rank=data.rank,
        size=data.size,
        engine="pipeline" if data.engine == BY_HAND and data.size == 1 else data.engine,
        alike=max(1, data.alike // len(ranks)),  # ranks with other stages have other tensors
        part=data.part,
        parts=data.parts,
        pipeline=pipeline,
    )
