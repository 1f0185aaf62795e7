"""A small byte-level GPT.

Shape suffixes (`x_BTD` has the axes B, T, D):

* B: samples in the batch or micro-batch
* T: positions, bytes of context
* D: width of the residual stream
* H: attention heads
* K: width of a head, D / H
* V: vocabulary, the 256 bytes
"""

# ruff: noqa: N803, N806  names carry their shape as a suffix

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from traindiff.errors import ConfigError, Problem

VOCABULARY = 256
"""Number of tokens; a token is a byte."""

_MODULES = ("argparse", "ast", "bdb", "calendar", "configparser", "dataclasses", "difflib", "doctest")
_MOST_BYTES = 1 << 19
_STRIDE = 7919  # a prime: consecutive samples come from places far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one step, or of one micro-batch.

    Attributes:
        inputs: Bytes, int64 [B, T].
        targets: The byte that follows each of them, int64 [B, T].
        sample_ids: Number of each sample, unique in the whole training, int64 [B].
    """

    inputs: Tensor
    targets: Tensor
    sample_ids: Tensor

    def split(self, parts: int) -> list[Batch]:
        """Micro-batches of equal size, in order; `parts` divides the number of samples."""
        return [
            Batch(inputs=inputs, targets=targets, sample_ids=sample_ids)
            for inputs, targets, sample_ids in zip(
                self.inputs.chunk(parts), self.targets.chunk(parts), self.sample_ids.chunk(parts), strict=True
            )
        ]


def read_text(directory: Path | None = None) -> Tensor:
    """The bytes of a few modules of the standard library, one after the other, in a fixed order.

    One Python version gives the same text on every machine. If none of the chosen modules exists as source, all Python
    sources of the directory are taken, in order of their paths.

    Args:
        directory: The standard library; by default that of the running interpreter.

    Returns:
        uint8, one axis, at most 512 KiB.

    Raises:
        ConfigError: The directory holds no Python source (a zipped or stripped installation).
    """
    where = Path(sysconfig.get_path("stdlib")) if directory is None else directory
    chosen = [path for name in _MODULES if (path := where / f"{name}.py").is_file()]
    content = b"".join(path.read_bytes() for path in chosen or sorted(where.rglob("*.py")))
    if not content:
        problem = Problem(
            where=f"standard library in {where}",
            what="holds no Python source files, which are the text that the demo trains on.",
            fix="Use a Python that was installed with its sources, neither zipped nor stripped.",
        )
        raise ConfigError("the demo", [problem], consequence="nothing was trained")
    return torch.frombuffer(bytearray(content[:_MOST_BYTES]), dtype=torch.uint8)


def make_batch(text: Tensor, step: int, *, batch_size: int, context: int, seed: int) -> Batch:
    """The batch of a step: a pure function of its arguments, which draws no random numbers.

    Args:
        text: uint8, one axis, longer than `context`.
        step: Counted from 0.
        batch_size: B, samples in the batch.
        context: T, bytes in a sample.
        seed: Selects where in the text the samples start.
    """
    sample_ids = torch.arange(step * batch_size, (step + 1) * batch_size)
    starts = (sample_ids + seed * _STRIDE) * _STRIDE % (len(text) - context)
    windows = text[starts[:, None] + torch.arange(context + 1)].to(torch.int64)
    return Batch(inputs=windows[:, :-1], targets=windows[:, 1:], sample_ids=sample_ids)


_Word = TypeVar("_Word", int, Tensor)

_LOW_32 = 0xFFFFFFFF
_START = 0x9E3779B9  # not 0, because `mix` maps 0 to 0


def mix(word: _Word) -> _Word:
    """A bijection of 32-bit words, in which every bit of the result depends on every bit of `word`.

    Both multipliers are below 2^31, so the products fit in torch's signed 64-bit integers.
    (This is prospector32 of https://nullprogram.com/blog/2018/07/31/.)

    Args:
        word: A number in [0, 2^32), or an int64 tensor of them, which is not changed.
    """
    word = word ^ (word >> 15)
    word = word * 0x2C1B3C6D & _LOW_32
    word = word ^ (word >> 12)
    word = word * 0x297A2D39 & _LOW_32
    return word ^ (word >> 15)


def sample_keys(sample_ids: Tensor, *, step: int, seed: int) -> Tensor:
    """Keys of the samples' dropout masks: int64 [B], in [0, 2^32); each step and each seed has other keys."""
    return mix(mix(mix(seed + _START & _LOW_32) ^ step) ^ sample_ids & _LOW_32)


class Dropout(nn.Module):
    """Set some entries to zero, and scale the others so that the mean does not change.

    The mask is a hash of (sample, step, seed, this layer, position, channel). So it is the same in one batch and in
    micro-batches, and draws nothing from torch's random number generators.

    Args:
        probability: Probability that an entry becomes zero, in [0, 1).
        layer: Number that no other dropout layer of the model has.
    """

    def __init__(self, probability: float, *, layer: int) -> None:
        super().__init__()
        self.probability = probability
        self.layer = layer

    def forward(self, x_BTD: Tensor, key_B: Tensor) -> Tensor:
        """`x_BTD` with entries dropped; unchanged in evaluation."""
        if not self.training or not self.probability:
            return x_BTD
        return x_BTD * self.mask(key_B, x_BTD.shape[1], x_BTD.shape[2]).to(x_BTD.dtype)

    def mask(self, key_B: Tensor, length: int, width: int) -> Tensor:
        """Factors of each entry, 0 or 1 / (1 - probability): float32 [B, length, width]."""
        place_TD = torch.arange(length * width, device=key_B.device).view(length, width)
        layer_key_B = mix(key_B ^ self.layer)
        word_BTD = mix(layer_key_B[:, None, None] ^ mix(place_TD))
        kept_BTD = word_BTD >= round(self.probability * 2**32)
        return kept_BTD.to(torch.float32) / (1 - self.probability)

    def extra_repr(self) -> str:
        """The fields that `print(model)` shows."""
        return f"probability={self.probability}, layer={self.layer}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Shape of the model; the defaults give 1.3 million parameters."""

    num_layers: int = 4
    width: int = 160
    num_heads: int = 5
    context: int = 64
    dropout: float = 0.1


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, size: ModelSize, *, layer: int) -> None:
        super().__init__()
        self.head_width = size.width // size.num_heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.proj = nn.Linear(size.width, size.width)
        self.drop = Dropout(size.dropout, layer=2 * layer + 1)

    def visible(self, length: int, device: torch.device) -> Tensor:
        """True where a position (first axis) may attend to a position (second axis): bool [T, T]."""
        return torch.ones(length, length, dtype=torch.bool, device=device).tril()

    def heads(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of every head: three of [B, H, T, K]."""
        parts_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        return tuple(part_BTD.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part_BTD in parts_BTD)

    def forward(self, x_BTD: Tensor, key_B: Tensor) -> Tensor:
        """The heads' outputs, projected back to the residual stream: [B, T, D]."""
        q_BHTK, k_BHTK, v_BHTK = self.heads(x_BTD)
        score_BHTT = q_BHTK @ k_BHTK.transpose(-2, -1) / sqrt(self.head_width)
        hidden_TT = ~self.visible(x_BTD.shape[1], x_BTD.device)
        weight_BHTT = score_BHTT.masked_fill(hidden_TT, -torch.inf).softmax(-1)
        found_BTD = (weight_BHTT @ v_BHTK).transpose(1, 2).flatten(-2)
        dropped_BTD: Tensor = self.drop(self.proj(found_BTD), key_B)
        return dropped_BTD


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, size: ModelSize, *, layer: int) -> None:
        super().__init__()
        self.fc = nn.Linear(size.width, 4 * size.width)
        self.act = nn.GELU()
        self.proj = nn.Linear(4 * size.width, size.width)
        self.drop = Dropout(size.dropout, layer=2 * layer + 2)

    def forward(self, x_BTD: Tensor, key_B: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        dropped_BTD: Tensor = self.drop(self.proj(self.act(self.fc(x_BTD))), key_B)
        return dropped_BTD


class Block(nn.Module):
    """One layer: attention and MLP, each behind a LayerNorm and added to the residual stream."""

    def __init__(self, size: ModelSize, *, layer: int, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.width)
        self.attn = attention(size, layer=layer)
        self.ln_2 = nn.LayerNorm(size.width)
        self.mlp = MLP(size, layer=layer)

    def forward(self, x_BTD: Tensor, key_B: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD), key_B)
        out_BTD: Tensor = x_BTD + self.mlp(self.ln_2(x_BTD), key_B)
        return out_BTD


class Embedding(nn.Module):
    """The embeddings of bytes and of their positions."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, size.width)
        self.wpe = nn.Embedding(size.context, size.width)
        self.drop = Dropout(size.dropout, layer=0)

    def forward(self, inputs_BT: Tensor, key_B: Tensor) -> Tensor:
        """Bytes [B, T] -> [B, T, D]."""
        # The position embedding has no batch axis: its output is [T, D], added to every sample.
        position_TD = self.wpe(torch.arange(inputs_BT.shape[1], device=inputs_BT.device))
        x_BTD: Tensor = self.drop(self.wte(inputs_BT) + position_TD, key_B)
        return x_BTD


class Transformer(Embedding):
    """Embeddings, blocks and the last LayerNorm."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__(size)
        self.h = nn.ModuleList(Block(size, layer=layer) for layer in range(size.num_layers))
        self.ln_f = nn.LayerNorm(size.width)

    def forward(self, inputs_BT: Tensor, key_B: Tensor) -> Tensor:
        """Bytes [B, T] -> [B, T, D]."""
        x_BTD = super().forward(inputs_BT, key_B)
        for block in self.h:
            x_BTD = block(x_BTD, key_B)
        normed_BTD: Tensor = self.ln_f(x_BTD)
        return normed_BTD


class LanguageModel(nn.Module):
    """A GPT over bytes that returns its loss. Head and embedding share one matrix.

    Args:
        size: Its shape.
        seed: Seed of the dropout masks.
    """

    def __init__(self, size: ModelSize, *, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.transformer = Transformer(size)
        self.lm_head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.lm_head.weight = self.transformer.wte.weight

    def block(self, layer: int) -> Block:
        """One layer, counted from 0."""
        block = self.transformer.h[layer]
        assert isinstance(block, Block)
        return block

    def forward(self, inputs_BT: Tensor, targets_BT: Tensor, sample_ids_B: Tensor, *, step: int) -> Tensor:
        """Mean cross-entropy, in nats per byte, over all positions of the (micro-)batch: a scalar."""
        key_B = sample_keys(sample_ids_B, step=step, seed=self.seed)
        logits_BTV = self.lm_head(self.transformer(inputs_BT, key_B))
        return functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


_Model = TypeVar("_Model", bound=nn.Module)


def build_model(kind: type[_Model], size: ModelSize, *, seed: int) -> _Model:
    """A model with freshly drawn weights; torch's random number generators are left unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(size, seed=seed)
        _draw_weights(model, num_layers=size.num_layers)
    return model


def _draw_weights(model: nn.Module, *, num_layers: int) -> None:
    """Draw the weights of a GPT from torch's random number generator.

    Matrices are drawn from N(0, 0.02^2). Those that write to the residual stream have a standard deviation smaller by
    sqrt(2 * layers), as in GPT-2. Biases are 0.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            smaller = sqrt(2 * num_layers) if name.endswith("proj.weight") else 1.0
            nn.init.normal_(parameter, std=0.02 / smaller)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)
