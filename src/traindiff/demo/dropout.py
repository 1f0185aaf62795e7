"""Dropout whose mask is a function of the sample, not of the order in which samples are computed."""
# ruff: noqa: N803, N806  names carry their shape as a suffix, see model.py

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

_Word = TypeVar("_Word", int, Tensor)

_LOW_32 = 0xFFFFFFFF
_START = 0x9E3779B9  # not 0, which is mixed to 0


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
    """What the masks of each sample depend on, besides the layer.

    Args:
        sample_ids: int64 [B].
        step: Another step has other masks.
        seed: Another seed has other masks.

    Returns:
        int64 [B], in [0, 2^32).
    """
    return mix(mix(mix(seed + _START & _LOW_32) ^ step) ^ sample_ids & _LOW_32)


class Dropout(nn.Module):
    """Zero some entries and scale the others so that the mean stays.

    The mask is a hash of (sample, step, seed, this layer, position, channel). It is therefore the
    same in one batch and in micro-batches, and nothing is drawn from torch's random number
    generators.

    Args:
        probability: Of an entry to become zero, in [0, 1).
        layer: Number that no other dropout layer of the model has.
    """

    def __init__(self, probability: float, *, layer: int) -> None:
        super().__init__()
        self.probability = probability
        self.layer = layer

    def forward(self, x_BTD: Tensor, key_B: Tensor) -> Tensor:
        """`x_BTD` with entries dropped; as it is in evaluation."""
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
        """What `print(model)` shows."""
        return f"probability={self.probability}, layer={self.layer}"
