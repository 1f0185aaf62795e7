"""Legal variations: other ways to compute the same thing, as functions from recipe to recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.faults.models import Attention, Block, FeedForward
from tests.faults.recipe import Recipe

Variation = Callable[[Recipe], Recipe]


def replace_forward(model: nn.Module, kind: type[nn.Module], forward: Callable[..., Any]) -> int:
    """Give every module of a class another forward, under the same name."""
    found = [module for module in model.modules() if type(module) is kind]
    for module in found:
        module.forward = forward.__get__(module)  # type: ignore[method-assign]
    return len(found)


def _forwards(kind: type[nn.Module], forward: Callable[..., Any]) -> Variation:
    def prepare(model: nn.Module) -> None:
        assert replace_forward(model, kind, forward)

    return lambda recipe: recipe.but(prepare=prepare)


def _columns(self: nn.Linear, x: Tensor) -> Tensor:
    half = self.out_features // 2
    bias = self.bias
    parts = (self.weight[:half], self.weight[half:])
    biases = (None, None) if bias is None else (bias[:half], bias[half:])
    return torch.cat([functional.linear(x, w, b) for w, b in zip(parts, biases, strict=True)], -1)


def _rows(self: nn.Linear, x: Tensor) -> Tensor:
    half = self.in_features // 2
    whole = functional.linear(x[..., :half], self.weight[:, :half]) + functional.linear(
        x[..., half:], self.weight[:, half:]
    )
    return whole if self.bias is None else whole + self.bias


def _einsum(self: nn.Linear, x: Tensor) -> Tensor:
    whole = torch.einsum("...i,oi->...o", x, self.weight)
    return whole if self.bias is None else whole + self.bias


def _layer_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    mean = wide.mean(-1, keepdim=True)
    variance = (wide * wide).mean(-1, keepdim=True) - mean * mean
    y = (wide - mean) * torch.rsqrt(variance + self.eps)
    return (y * self.weight + self.bias).to(x.dtype if x.dtype == self.weight.dtype else self.weight.dtype)


def _checkpointed(kind: type[nn.Module]) -> Variation:
    plain = kind.forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(plain.__get__(self), x, use_reentrant=False)

    return _forwards(kind, forward)


def _optimizer(kind: type[torch.optim.Optimizer], **options: Any) -> Variation:
    def change(recipe: Recipe) -> Recipe:
        def build(model: nn.Module) -> torch.optim.Optimizer:
            plain = recipe.optimizer(model)
            assert type(plain) is kind
            settings = {name: value for name, value in plain.defaults.items() if name not in ("foreach", "fused")}
            settings.pop("decoupled_weight_decay", None)
            return kind(model.parameters(), **{**settings, **options})

        return recipe.but(optimizer=build)

    return change


def _accumulated(*sizes: int) -> Variation:
    return lambda recipe: recipe.but(micro_batches=sizes)


def _fused_attention(recipe: Recipe) -> Recipe:
    def prepare(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Attention):
                module.fused = True

    return recipe.but(prepare=prepare)


def _threads(recipe: Recipe) -> Recipe:
    def build() -> nn.Module:
        torch.set_num_threads(2)
        return recipe.build()

    return recipe.but(build=build)


SAME: Variation = lambda recipe: recipe  # noqa: E731

EVERYWHERE: dict[str, Variation] = {
    "again": SAME,
    "threads": _threads,
    "linear-columns": _forwards(nn.Linear, _columns),
    "linear-rows": _forwards(nn.Linear, _rows),
    "linear-einsum": _forwards(nn.Linear, _einsum),
}
ACCUMULATION: dict[str, Variation] = {
    "accumulated-2": _accumulated(3, 5),
    "accumulated-4": _accumulated(2, 1, 3, 2),
}
LAYER_NORM: dict[str, Variation] = {"layer-norm": _forwards(nn.LayerNorm, _layer_norm)}
ATTENTION: dict[str, Variation] = {
    "attention": _fused_attention,
    "checkpointed-block": _checkpointed(Block),
    "checkpointed-mlp": _checkpointed(FeedForward),
}
DOUBLE: dict[str, Variation] = {"float64": lambda recipe: recipe.but(double=True)}
KINDS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def variations(model: str, optimizer: str, precision: str) -> dict[str, Variation]:
    """By name: every variation that is legal for this training."""
    kind = KINDS[optimizer]
    found = dict(EVERYWHERE)
    found["optimizer-for-loop"] = _optimizer(kind, foreach=False)
    found["optimizer-foreach"] = _optimizer(kind, foreach=True)
    if (optimizer, precision) != ("sgd", "bfloat16"):  # torch 2.13 on the CPU: it does not update; test_faults.py
        found["optimizer-fused"] = _optimizer(kind, fused=True)
    # Statistics over the batch are not those over its parts; the states of an LSTM have their batch axis elsewhere.
    if model not in ("conv", "lstm"):
        found |= ACCUMULATION
    if model in ("mlp", "gpt"):
        found |= LAYER_NORM
    if model == "gpt":
        found |= ATTENTION
    if precision == "float32":
        found |= DOUBLE
    return found
