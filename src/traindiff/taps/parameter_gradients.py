"""Observe what each micro-batch contributes to the gradients of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import Tensor, nn

from traindiff.shards import Piece
from traindiff.site import canonical_path
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


def tap_gathered_gradients(
    modules: Mapping[str, nn.Module], first_name: Callable[[str], str], selects: Callable[[str], bool], sink: Sink
) -> ExitStack:
    """The same for modules of FSDP2, which puts gathered parameters in the places of its own while they compute.

    Args:
        modules: Those that FSDP2 manages, by canonical path.
        first_name: Gives the path under which a parameter is filed.
        selects: Whether the parameter with this path is observed.
        sink: Receives the observations.

    Returns:
        Close it to remove the tap.
    """
    hooked: dict[int, Tensor] = {}  # the tensors themselves, so that no other gets the id of one
    undo = ExitStack()

    def before_forward(prefix: str, module: nn.Module, *_: Any) -> None:
        for name, parameter in module.named_parameters():
            path = first_name(canonical_path(f"{prefix}.{name}" if prefix else name))
            if id(parameter) in hooked or not parameter.requires_grad or not selects(path):
                continue
            hooked[id(parameter)] = parameter
            hook = sink.guarded("parameter_gradients", partial(_contribution, parameter, _whole(path), selects, sink))
            undo.callback(parameter.register_hook(hook).remove)

    undo.callback(hooked.clear)
    for prefix, module in modules.items():
        hook = sink.guarded("parameter_gradients", partial(before_forward, prefix))
        undo.callback(module.register_forward_pre_hook(hook).remove)  # behind the one that gathers
    return undo


def _whole(path: str) -> PiecesOf:
    return lambda parameter, size=None: (Piece(path=path),)  # noqa: ARG005


def _contribution(
    leaf: Tensor, pieces_of: PiecesOf, selects: Callable[[str], bool], sink: Sink, gradient: Tensor | None
) -> None:
    if gradient is None or not sink.progress.observing:
        return  # a function of the user's may give None
    gradient = as_dense(gradient)
    for piece in pieces_of(leaf, gradient.numel()) or ():
        if selects(piece.path):
            call = sink.progress.next_call(piece.path, "micro")
            emit_pieces(sink, gradient, [piece], phase="grad", slot="grad", stage="micro", call=call, merge="sum")
