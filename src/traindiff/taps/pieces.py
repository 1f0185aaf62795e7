"""Observe a tensor that holds parts of parameters: each part at the site of its parameter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor

from traindiff.shards import Piece, Shard
from traindiff.taps.sink import Sink


class PiecesOf(Protocol):
    """Says what a tensor that an optimizer or autograd takes for a parameter holds of the model's."""

    def __call__(self, parameter: Tensor, size: int | None = None) -> tuple[Piece, ...] | None:
        """Its pieces: empty where it holds no element just now, None where it is none of the model's.

        Args:
            parameter: The tensor.
            size: Elements of its gradient, where that is asked for.
        """


def emit_pieces(sink: Sink, tensor: Tensor, pieces: Iterable[Piece], **about: Any) -> None:
    """Hand each piece of a tensor to the sink, as a view.

    Args:
        sink: Receives the observations.
        tensor: The tensor, or one that is laid out like it.
        pieces: What of it is observed.
        about: Arguments of `Sink.emit` but for path and shard.
    """
    for piece in pieces:
        part = tensor if piece.shard is None else elements(tensor, piece.first, piece.shard)
        sink.emit(part, path=piece.path, shard=piece.shard, **about)


def elements(tensor: Tensor, first: int, shard: Shard) -> Tensor:
    """A view of some elements of a contiguous tensor, one after the other, in the shape of their shard."""
    return tensor.detach().reshape(-1)[first : first + shard.size].view(shard.shape)
