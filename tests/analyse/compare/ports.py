"""A small language model in two layouts: separate projections, and fused ones; and recordings of both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

import traindiff

WIDTH, HEADS, WORDS, LAYERS = 16, 2, 24, 2

Fault = Callable[[nn.Module, int], None]
"""Is called with the model and the step, after the backward pass."""


class Attention(nn.Module):
    """Self-attention whose queries, keys and values come from three projections."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x: Tensor) -> Tensor:
        heads = (one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in self.projected(x))
        mixed = scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Fused(Attention):
    """The same, from one projection."""

    def __init__(self) -> None:
        super().__init__()
        del self.q, self.k, self.v
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)


class Block(nn.Module):
    """A layer, with other names in the port."""

    def __init__(self, *, port: bool) -> None:
        super().__init__()
        self.names = ("norm_a", "mixer", "norm_b", "fc1", "fc2") if port else ("ln_1", "attn", "ln_2", "up", "down")
        made = (
            nn.LayerNorm(WIDTH), Fused() if port else Attention(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )  # fmt: skip
        for name, module in zip(self.names, made, strict=True):
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        first, mixer, second, up, down = (getattr(self, name) for name in self.names)
        x = x + mixer(first(x))
        return x + down(gelu(up(second(x))))


class Model(nn.Module):
    """A causal language model that returns its loss; the port pads its vocabulary if asked."""

    def __init__(self, *, port: bool, words: int = WORDS) -> None:
        super().__init__()
        self.port = port
        embedding, layers = nn.Embedding(words, WIDTH), nn.ModuleList([Block(port=port) for _ in range(LAYERS)])
        if port:
            self.tok, self.blocks = embedding, layers
        else:
            self.wte, self.h = embedding, layers
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = (self.tok if self.port else self.wte)(x)
        for layer in self.blocks if self.port else self.h:
            x = layer(x)
        logits = self.head(x)[..., :WORDS]
        return cross_entropy(logits.flatten(0, 1), y.flatten())


MAP = """
[[tensor]]
baseline = ["h.{n}.attn.q.weight", "h.{n}.attn.k.weight", "h.{n}.attn.v.weight"]
candidate = ["blocks.{n}.mixer.qkv.weight"]
[[tensor]]
baseline = ["h.{n}.attn.q.bias", "h.{n}.attn.k.bias", "h.{n}.attn.v.bias"]
candidate = ["blocks.{n}.mixer.qkv.bias"]
"""
RENAMED = {
    "h.{n}.ln_1": "blocks.{n}.norm_a", "h.{n}.attn.o": "blocks.{n}.mixer.o", "h.{n}.ln_2": "blocks.{n}.norm_b",
    "h.{n}.up": "blocks.{n}.fc1", "h.{n}.down": "blocks.{n}.fc2",
}  # fmt: skip
for own, other in RENAMED.items():
    for part in ("weight", "bias"):
        MAP += f'[[tensor]]\nbaseline = ["{own}.{part}"]\ncandidate = ["{other}.{part}"]\n'
MAP += '[[tensor]]\nbaseline = ["wte.weight"]\ncandidate = ["tok.weight"]\n'


def original() -> Model:
    """The model with separate projections."""
    torch.manual_seed(0)
    return Model(port=False)


def ported(model: Model, *, words: int = WORDS) -> Model:
    """The same model in the other layout."""
    port, state = Model(port=True, words=words), model.state_dict()
    padding = torch.zeros(words - WORDS, WIDTH)
    for layer in range(LAYERS):
        here = f"h.{layer}.attn"
        for part in ("weight", "bias"):
            fused = torch.cat([state.pop(f"{here}.{one}.{part}") for one in "qkv"])
            state[f"blocks.{layer}.mixer.qkv.{part}"] = fused
            for own, other in RENAMED.items():
                name = f"{own}.{part}".replace("{n}", str(layer))
                state[f"{other}.{part}".replace("{n}", str(layer))] = state.pop(name)
    state["tok.weight"] = torch.cat([state.pop("wte.weight"), padding])
    state["head.weight"] = torch.cat([state.pop("head.weight"), padding])
    port.load_state_dict(state)
    return port


def train(path: Path, model: nn.Module, *, fault: Fault | None = None, steps: int = 3, **settings: object) -> Path:
    """Train and record a model; the same batches each time."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer, **settings):  # type: ignore[arg-type]
        for step in range(steps):
            tokens = torch.randint(0, WORDS, (4, 7), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            if fault is not None:
                fault(model, step)
            optimizer.step()
    return path
