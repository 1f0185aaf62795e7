"""The small training of this directory as a pipeline: stages, schedules, and faults that a pipeline can have."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    SplitPoint,
    pipeline,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, Block
from tests.observe.sharding.training import WIDTH as WIDTH

BLOCKS = 4

Spoil = Callable[[Any, PipelineStage], None]
"""A fault: is given the schedule and a stage before the first step."""


class Deep(nn.Module):
    """[batch, length] of tokens -> [batch, length, VOCABULARY]. Layers that are None are those of other stages."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(BLOCKS)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed else x
        for block in self.blocks.values():
            x = block(x)
        return self.head(self.norm(x)) if self.norm and self.head else x


class TracedDeep(nn.Module):
    """The same, as the tracing frontend can divide it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def part_of(model: Deep, stage: int, num_stages: int) -> Deep:
    """What a stage has of the model."""
    each = BLOCKS // num_stages
    for number in range(BLOCKS):
        if number // each != stage:
            del model.blocks[str(number)]
    if stage > 0:
        model.embed = None
    if stage < num_stages - 1:
        model.norm = model.head = None
    return model


WRAPS: dict[str, Callable[[nn.Module, DeviceMesh], nn.Module]] = {
    "": lambda part, mesh: part,
    "ddp": lambda part, mesh: DistributedDataParallel(part, process_group=mesh.get_group()),
    "fsdp": lambda part, mesh: fully_shard(part, mesh=mesh),
    "tensor parallel": lambda part, mesh: parallelize_module(
        part, mesh, {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    ),
}
"""What else divides the batch, or the model."""

SEVERAL_STAGES: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
"""Schedules with two stages per rank."""


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def make_model(dtype: torch.dtype, *, traced: bool = False, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = (TracedDeep() if traced else Deep()).to(dtype)
    if tied:
        model.head.weight = model.embed.weight
    return model


def make_optimizer(parts: Sequence[nn.Module], *, grouped: bool) -> torch.optim.Optimizer:
    """`grouped` says whether the embedding, which only the first stage has, is a group of its own."""
    named = {name: parameter for part in parts for name, parameter in part.named_parameters()}
    embedding = [parameter for name, parameter in named.items() if grouped and name == "embed.weight"]
    rest = [parameter for parameter in named.values() if all(parameter is not one for one in embedding)]
    groups = [{"params": embedding, "lr": 3e-3}] if embedding else []
    return torch.optim.AdamW([*groups, {"params": rest}], lr=1e-2)


def batches(steps: int, size: int) -> list[tuple[Tensor, Tensor]]:
    data = torch.Generator().manual_seed(1)
    tokens = [torch.randint(VOCABULARY, (size, LENGTH + 1), generator=data) for _ in range(steps)]
    return [(one[:, :-1], one[:, 1:]) for one in tokens]


def train_whole(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    size: int = BATCH,
    observe: Sequence[str] | None = None,
    tied: bool = False,
    grouped: bool = False,
) -> None:
    """One process, the whole model, the whole batch."""
    model = make_model(dtype, tied=tied)
    optimizer = make_optimizer([model], grouped=grouped)
    with traindiff.record(path, model, optimizer, strict=True, observe=observe):
        for tokens, labels in batches(steps, size):
            mean_loss(model(tokens), labels).backward()
            optimizer.step()
            optimizer.zero_grad()


def places(rank: int, num_ranks: int, pipelines: int, wrap: str) -> tuple[DeviceMesh, int, int, int]:
    """The mesh, which pipeline a rank is in, its place in that, and how many pipelines share the batch."""
    if wrap == "tensor parallel":  # innermost, and the batch is the same
        mesh = init_device_mesh("cpu", (num_ranks, pipelines), mesh_dim_names=("stages", "data"))
        return mesh, rank % pipelines, rank // pipelines, 1
    mesh = init_device_mesh("cpu", (pipelines, num_ranks), mesh_dim_names=("data", "stages"))
    return mesh, rank // num_ranks, rank % num_ranks, pipelines


def train_pipelined(
    path: str | os.PathLike[str],
    schedule: str = "gpipe",
    *,
    dtype: torch.dtype = torch.float32,
    steps: int = 2,
    size: int = BATCH,
    chunks: int = 4,
    pipelines: int = 1,
    scale_grads: bool = True,
    observe: Sequence[str] | None = None,
    tied: bool = False,
    reduce_tied: bool = True,
    grouped: bool = False,
    wrap: str = "",
    spoil: Spoil | None = None,
    before_step: Callable[[nn.Module], None] | None = None,
    record: bool = True,
) -> list[float]:
    """Every rank has its stages. `pipelines` of them work beside each other, each on a part of the batch.

    Returns:
        The sum of all parameters of the rank after each step.
    """
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    num_ranks = world_size // pipelines
    mesh, mine, place, shares = places(rank, num_ranks, pipelines, wrap)
    each = 2 if schedule in SEVERAL_STAGES else 1
    numbers = [place + number * num_ranks for number in range(each)]
    device = torch.device("cpu")
    loss_fn = mean_loss if scale_grads else lambda logits, labels: mean_loss(logits, labels) / chunks
    if schedule == "traced":
        model = make_model(dtype, traced=True)
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)  # torch.export's own
        points = {f"blocks.{n * BLOCKS // num_ranks}": SplitPoint.BEGINNING for n in range(1, num_ranks)}
        example = torch.zeros(size // chunks, LENGTH, dtype=torch.long)
        stages = [pipeline(model, (example,), split_spec=points).build_stage(place, device, mesh.get_group("stages"))]
    else:
        num_stages = num_ranks * each
        stages = [
            PipelineStage(
                WRAPS[wrap](part_of(make_model(dtype, tied=tied), number, num_stages), mesh["data"]), number,
                num_stages, device, group=mesh.get_group("stages"),
            )
            for number in numbers
        ]  # fmt: skip
    parts = [stage.submod for stage in stages]
    kinds = {"gpipe": ScheduleGPipe, "traced": ScheduleGPipe, "1f1b": Schedule1F1B}
    if schedule in SEVERAL_STAGES:
        runs: Any = SEVERAL_STAGES[schedule](stages, chunks, loss_fn, scale_grads=scale_grads)
    else:
        runs = kinds[schedule](stages[0], chunks, loss_fn, scale_grads=scale_grads)
    if spoil:
        for stage in stages:
            spoil(runs, stage)
    optimizer = make_optimizer(parts, grouped=grouped)
    untied = [p for part in parts for name, p in part.named_parameters() if name in ("embed.weight", "head.weight")]
    peers = distributed.new_group([0, world_size - 1]) if tied else None
    sums = []
    with (
        traindiff.record(path, parts if len(parts) > 1 else parts[0], optimizer, strict=True, observe=observe)
        if record
        else nullcontext()
    ):
        for batch in batches(steps, size):
            tokens, labels = (one.chunk(shares)[mine % shares] for one in batch)
            inputs = (tokens,) if numbers[0] == 0 else ()
            runs.step(*inputs, target=labels)
            if pipelines > 1 and not wrap:
                for parameter in parts[0].parameters():
                    distributed.all_reduce(parameter.grad, group=mesh.get_group("data"))
                    parameter.grad /= pipelines
            if tied and reduce_tied and untied:
                distributed.all_reduce(untied[0].grad, group=peers)
            if before_step:
                before_step(parts[0])
            optimizer.step()
            optimizer.zero_grad()
            sums.append(
                sum(parameter.detach().double().sum().item() for part in parts for parameter in part.parameters())
            )
    return sums
