"""Two recipes: trainings that `traindiff verify` can run itself, and examples of how to write one.

`gpt` trains the demo's GPT in a form that engines can divide: by heads, by columns of matrices, in stages of a
pipeline. Head and embedding share one matrix, as in the demo. Shape suffixes are those of `model.py`.
"""

# ruff: noqa: N803, N806  names carry their shape as a suffix

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from traindiff.run.config.training import Training
from traindiff.run.demo.model import (
    VOCABULARY,
    Attention,
    Batch,
    Block,
    Embedding,
    ModelSize,
    build_model,
    make_batch,
    read_text,
    sample_keys,
)

_BATCH_SIZE = 8


def gpt() -> Training:
    """The demo's GPT on the source of Python's standard library; every engine can run it."""
    size = ModelSize(width=128, num_heads=4)
    seed = int(torch.randint(1 << 31, ()))
    model, text = build_model(DivisibleModel, size, seed=seed), read_text()
    parameters = list(model.parameters())
    matrices, others = [p for p in parameters if p.dim() >= 2], [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]

    def batch(step: int) -> Batch:
        return make_batch(text, step, batch_size=_BATCH_SIZE, context=size.context, seed=seed)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch.inputs, sample_ids_B=batch.sample_ids)
        return functional.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten())

    return Training(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95)),
        batches=map(batch, range(1_000_000)),
        loss=loss,
        tensor_parallel=divide,
        pipeline=stage_of,
        # One vector per position; with one sample their number equals that of the bytes in the batch.
        record={"batch_axis": {"embedding.wpe": None}},
    )


def mlp() -> Training:
    """Two layers that learn in which quarter of the plane a point lies."""
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 4))
    points = torch.randn(100, 32, 2)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        labels = (batch[:, 0] > 0).long() + 2 * (batch[:, 1] > 0).long()
        return functional.cross_entropy(model(batch).float(), labels)

    return Training(
        model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), batches=points, loss=loss
    )  # fmt: skip


class DivisibleAttention(Attention):
    """Attention in which queries, keys and values of one head are neighbors in the output of `qkv`.

    A rank that holds the first columns of `qkv` therefore holds whole heads, and computes with these.
    """

    def heads(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of every head of this rank: three of [B, H, T, K]."""
        each_BTH3K = self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_width))
        return tuple(each_BTHK.transpose(1, 2) for each_BTHK in each_BTH3K.unbind(-2))


class Head(nn.Module):
    """The last LayerNorm and the matrix that gives logits."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.ln_f = nn.LayerNorm(size.width)
        self.lm_head = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, V]."""
        logits_BTV: Tensor = self.lm_head(self.ln_f(x_BTD))
        return logits_BTV


class DivisibleModel(nn.Module):
    """A GPT over bytes, or one stage of it; parts that a stage lacks are None.

    Args:
        size: Its shape.
        seed: Seed of the dropout masks, which depend on the samples only.
    """

    def __init__(self, size: ModelSize, *, seed: int) -> None:
        super().__init__()
        self.seed = seed
        embedding, head = Embedding(size), Head(size)
        head.lm_head.weight = embedding.wte.weight
        self.embedding: Embedding | None = embedding
        self.h = nn.ModuleList(
            Block(size, layer=layer, attention=DivisibleAttention) for layer in range(size.num_layers)
        )
        self.head: Head | None = head

    def forward(self, x: Tensor, *, sample_ids_B: Tensor) -> Tensor:
        """Bytes [B, T] -> logits [B, T, V]; between stages the residual stream [B, T, D].

        Args:
            x: Bytes, or the output of the stage before.
            sample_ids_B: Number of each sample, unique in the whole training, on every stage.
        """
        key_B = sample_keys(sample_ids_B, step=0, seed=self.seed)
        if self.embedding is not None:
            x = self.embedding(x, key_B)
        for block in self.h:
            if block is not None:
                x = block(x, key_B)
        return x if self.head is None else self.head(x)


def stage_of(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
    """One stage of a pipeline, with as many blocks as the others, give or take one. Everything keeps its path."""
    assert isinstance(model, DivisibleModel)
    num_blocks = len(model.h)
    for number in range(num_blocks):
        if number * num_stages // num_blocks != stage:
            setattr(model.h, str(number), None)
    if stage > 0:
        model.embedding = None
    if stage < num_stages - 1:
        model.head = None
    return model


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide attention by heads, the MLP by its inner axis, embedding and head by bytes, among the ranks of a mesh."""
    divided = {
        "embedding.wte": RowwiseParallel(input_layouts=Replicate()),
        "h.*.attn.qkv": ColwiseParallel(),
        "h.*.attn.proj": RowwiseParallel(),
        "h.*.mlp.fc": ColwiseParallel(),
        "h.*.mlp.proj": RowwiseParallel(),
        "head.lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, divided)
