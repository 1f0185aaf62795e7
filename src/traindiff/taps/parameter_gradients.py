"""Observe what each micro-batch contributes to the gradients of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from traindiff.taps.pieces import PiecesOf, emit_pieces
from traindiff.taps.sink import Sink
from traindiff.taps.sparse_gradients import as_dense


def tap_parameter_gradients(
    leaves: Iterable[Tensor], pieces_of: PiecesOf, selects: Callable[[str], bool], sink: Sink
) -> ExitStack:
    """Summarise each contribution before it is added to `.grad` (phase `grad`, stage `micro`).

    Contributions are terms of a sum. What the optimizer later sees can be held against that sum,
    which shows a contribution that was lost, doubled or scaled on the way.

    Args:
        leaves: What autograd differentiates by; those that need no gradient are passed over.
        pieces_of: What of which parameters such a tensor holds.
        selects: Whether the parameter with this path is observed.
        sink: Receives the observations.

    Returns:
        Close it to remove the tap.
    """
    with ExitStack() as undo:
        for leaf in leaves:
            if leaf.requires_grad:
                hook = sink.guarded("parameter_gradients", partial(_contribution, leaf, pieces_of, selects, sink))
                undo.callback(leaf.register_hook(hook).remove)
        return undo.pop_all()


def _contribution(
    leaf: Tensor, pieces_of: PiecesOf, selects: Callable[[str], bool], sink: Sink, gradient: Tensor
) -> None:
    if not sink.progress.observing:
        return
    gradient = as_dense(gradient)
    for piece in pieces_of(leaf, gradient.numel()) or ():
        if selects(piece.path):
            call = sink.progress.next_call(piece.path, "micro")
            emit_pieces(sink, gradient, [piece], phase="grad", slot="grad", stage="micro", call=call, merge="sum")
