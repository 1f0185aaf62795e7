"""The demo's GPT in a form that engines can divide: by heads, by columns of matrices, in stages of a pipeline.

Head and embedding share one matrix, as in the demo. Shape suffixes are those of `model.py`.
"""
# ruff: noqa: N803, N806  names carry their shape as a suffix

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from traindiff.run.demo.model import VOCABULARY, Attention, Block, Dropout, ModelSize, draw_weights, sample_keys


class DivisibleAttention(Attention):
    """Attention in which queries, keys and values of a head are neighbors in the output of `qkv`.

    So a rank that has the first columns of `qkv` has whole heads, and computes with those that it has.
    """

    def heads(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of every head that this rank has: three of [B, H, T, K]."""
        each_BTH3K = self.qkv(x_BTD).unflatten(-1, (-1, 3, self.head_width))
        return tuple(each_BTHK.transpose(1, 2) for each_BTHK in each_BTH3K.unbind(-2))


class Embedding(nn.Module):
    """Bytes and their positions."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, size.width)
        self.wpe = nn.Embedding(size.context, size.width)
        self.drop = Dropout(size.dropout, layer=0)

    def forward(self, inputs_BT: Tensor, key_B: Tensor) -> Tensor:
        """Bytes [B, T] -> [B, T, D]."""
        position_TD = self.wpe(torch.arange(inputs_BT.shape[1], device=inputs_BT.device))
        x_BTD: Tensor = self.drop(self.wte(inputs_BT) + position_TD, key_B)
        return x_BTD


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
    """A GPT over bytes, or a stage of one: what a stage does not have is None.

    Args:
        size: Its shape.
        seed: Of the dropout masks, which depend on the samples only.
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
            x: Bytes, or what the stage before returned.
            sample_ids_B: Number of each sample, unique in the whole training, on every stage.
        """
        key_B = sample_keys(sample_ids_B, step=0, seed=self.seed)
        if self.embedding is not None:
            x = self.embedding(x, key_B)
        for block in self.h:
            if block is not None:
                x = block(x, key_B)
        return x if self.head is None else self.head(x)


def build_divisible_model(size: ModelSize, *, seed: int) -> DivisibleModel:
    """A model with freshly drawn weights, as in the demo; torch's random number generators are left as they were."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DivisibleModel(size, seed=seed)
        draw_weights(model, num_layers=size.num_layers)
    return model


def stage_of(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
    """What one stage of a pipeline has: as many blocks as the others, give or take one; everything keeps its path."""
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
