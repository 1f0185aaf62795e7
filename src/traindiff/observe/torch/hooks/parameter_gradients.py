"""Observe what each micro-batch contributes to the gradients of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from traindiff.core.shards import Piece
from traindiff.observe.torch.hooks.context import TapContext, emit_pieces
from traindiff.observe.torch.hooks.followed_modules import HeldHooks
from traindiff.observe.torch.hooks.gathered_parameters import follow_gathered
from traindiff.observe.torch.hooks.nested import as_dense

PiecesOf = Callable[[Tensor, int], tuple[Piece, ...] | None]
"""Gives the pieces of the model's parameters in a leaf of the graph whose gradient has so many elements."""


def attach(context: TapContext) -> None:
    """Summarize each contribution before it is added to `.grad` (phase `grad`, stage `micro`).

    Contributions are terms of a sum. The gradients that the optimizer sees are compared with that sum, which shows a
    contribution that was lost, doubled or scaled on the way.
    """
    _Leaves(context).attach()

    def gathered(path: str, parameter: Tensor) -> None:
        context.undo.callback(parameter.register_hook(_hook(context, parameter, _whole(path))).remove)

    follow_gathered(context, "parameter_gradients", gathered)


class _Leaves:
    """The hooks on the leaves of the graph; a training may remove the hooks, or replace the leaves."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._hooks: dict[int, tuple[Tensor, HeldHooks]] = {}

    def attach(self) -> None:
        look = self._context.sink.guarded("parameter_gradients", self._look)
        self._context.events.before_forward.append(look)
        self._context.events.before_backward.append(look)
        self._context.events.after_step.append(look)
        self._context.undo.callback(self._remove)
        self._follow()

    def _follow(self) -> None:
        for leaf in self._context.targets.leaves:
            if leaf.requires_grad and id(leaf) not in self._hooks:
                hooks = HeldHooks()
                hooks.on_gradient(leaf, _hook(self._context, leaf, self._context.targets.pieces_of))
                self._hooks[id(leaf)] = leaf, hooks

    def _look(self, *about: Any) -> None:  # noqa: ARG002
        """Attach hooks that are gone, and put all behind others, which may change what is contributed.

        Before the backward pass, nothing of it is lost.
        """
        leaves = {id(leaf) for leaf in self._context.targets.leaves}
        for key, (_, hooks) in [*self._hooks.items()]:
            if key not in leaves or not hooks.are_there():
                hooks.remove()
                del self._hooks[key]
            else:
                hooks.put_last()
        self._follow()

    def _remove(self) -> None:
        for _, hooks in self._hooks.values():
            hooks.remove()
        self._hooks.clear()


def _whole(path: str) -> PiecesOf:
    return lambda *_: (Piece(path=path),)


def _hook(context: TapContext, leaf: Tensor, pieces_of: PiecesOf) -> Callable[..., Any]:
    return context.sink.guarded("parameter_gradients", partial(_contribution, context, leaf, pieces_of))


def _contribution(context: TapContext, leaf: Tensor, pieces_of: PiecesOf, gradient: Tensor | None) -> None:
    sink = context.sink
    if gradient is None or not sink.progress.observing:
        return  # a function of the user's may return None
    gradient = as_dense(gradient)
    for piece in pieces_of(leaf, gradient.numel()) or ():
        if context.targets.selects(piece.path):
            call = sink.progress.next_call(piece.path, "micro")
            emit_pieces(sink, gradient, [piece], phase="grad", slot="grad", stage="micro", call=call, merge="sum")
