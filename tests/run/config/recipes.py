"""A small training that every engine can run: residual blocks over tokens, tied or not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional

import traindiff
from tests.observe.sharding.training import BATCH, LENGTH, VOCABULARY, WIDTH, Block
from traindiff.run.demo.recipes import gpt

BLOCKS = 4
DECAYS = (0.1, 0.0)

COLUMNS_AND_ROWS = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


class Model(nn.Module):
    """[batch, length] of tokens -> [batch, length, VOCABULARY]. What is None is another stage's."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embed: nn.Embedding | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head: nn.Linear | None = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = x if block is None else block(x)
        return x if self.head is None else self.head(x)


class TracedModel(Model):
    """The same, as torch's tracing frontend can cut it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)  # type: ignore[misc]
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[misc]


def stage_of(model: nn.Module, stage: int, num_stages: int) -> nn.Module:
    assert isinstance(model, Model)
    for number in range(BLOCKS):
        if number * num_stages // BLOCKS != stage:
            setattr(model.blocks, str(number), None)
    if stage > 0:
        model.embed = None
    if stage < num_stages - 1:
        model.head = None
    return model


def batches(count: int = 4) -> list[Tensor]:
    data = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data) for _ in range(count)]


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices with weight decay, everything else without."""
    parameters = list(model.parameters())
    kinds = [[p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]]
    return [{"params": kind, "weight_decay": decay} for kind, decay in zip(kinds, DECAYS, strict=True)]


def training(model: nn.Module | None = None, **changes: Any) -> traindiff.Training:
    """The training, or one with other parts."""
    model = model or Model()
    parts: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(groups_of(model), lr=1e-2),
        "batches": batches(),
        "loss": mean_loss,
        "tensor_parallel": COLUMNS_AND_ROWS,
        "pipeline": stage_of,
    }
    return traindiff.Training(**{**parts, **changes})


def blocks() -> traindiff.Training:
    return training()


def tied() -> traindiff.Training:
    return training(Model(tied=True))


def traced() -> traindiff.Training:
    return training(TracedModel(), pipeline=["blocks.1", "blocks.2", "blocks.3"])


def flat() -> traindiff.Training:
    """Numbers in place of tokens, and no layers in lists: what is wrapped is the root alone."""
    model = nn.Sequential(nn.Linear(LENGTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    data = torch.Generator().manual_seed(1)
    pairs = [(torch.randn(BATCH, LENGTH, generator=data), torch.arange(BATCH)) for _ in range(4)]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).float(), batch[1])

    return training(model, batches=pairs, loss=loss, pipeline=["2"])


RECIPES = {"gpt": gpt, "blocks": blocks, "tied": tied, "traced": traced, "flat": flat}
