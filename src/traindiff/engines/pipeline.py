"""Pipeline parallelism: each rank has some stages of the model, and a schedule divides the batch into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import distributed

from traindiff.engines.data_parallel import BY_HAND, DataParallel, without
from traindiff.taps._torch_compat import num_chunks_of


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
        return self.size * self.pipeline.factor

    def to_json(self) -> dict[str, Any]:
        """For `run.json`."""
        pipeline = self.pipeline
        return {
            "data_parallel": self.size,
            "engine": self.engine,
            "pipeline": pipeline.num_stages,
            "schedule": pipeline.schedule,
            "micro_batches": pipeline.num_chunks,
            "scales_gradients": pipeline.scales_gradients,
        }


def beside_pipeline(data: DataParallel, pipeline: Pipeline) -> PipelineParallel:
    """How the batch is divided over ranks of which some share it as stages of one pipeline.

    Engines that divide it know that themselves. By hand, the ranks that are not of this pipeline are taken as
    those of further ones with the same stages, laid out in a mesh with two axes.
    """
    if data.engine != BY_HAND:
        return PipelineParallel(rank=data.rank, size=data.size, engine=data.engine, alike=data.alike, pipeline=pipeline)
    ranks = sorted(set(pipeline.ranks))
    size = distributed.get_world_size() // len(ranks)
    engine = "pipeline" if size == 1 else BY_HAND
    return PipelineParallel(rank=without(distributed.get_rank(), ranks), size=size, engine=engine, pipeline=pipeline)
