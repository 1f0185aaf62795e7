"""The parameters that an optimizer holds, looked up again only if its groups or the names of parameters changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import Tensor

from traindiff.core.shards import Piece
from traindiff.core.site import is_of_no_module, path_in_optimizer

if TYPE_CHECKING:
    from traindiff.observe.torch.hooks.context import TapContext

Held = tuple[int, Tensor, Sequence[Piece]]
"""A parameter with the number of its group, and with the pieces of the model's parameters in it."""


class HeldParameters:
    """What an optimizer holds.

    Args:
        context: The training.
        name: Name of the optimizer. Parameters that are not the model's are named by it, by group and by position, and
            are observed as if they were the model's.

    Attributes:
        all: Each parameter.
        selected: Each parameter with the pieces in it that are observed; none without such pieces.
        tensors: The parameters in `selected`.
        paths: Of the pieces in `selected`.
        are_whole: Every one of these is one parameter of the model.
        number: Counts the changes.
    """

    def __init__(self, context: TapContext, name: str) -> None:
        self._targets = context.targets
        self._name = name
        self._groups: list[list[Tensor]] = []
        self._changes = -1  # of the names of parameters
        self._of_model: set[int] = set()  # ids of those that are, or were, parameters of the model
        self.all: Sequence[Held] = ()
        self.selected: Sequence[tuple[Tensor, Sequence[Piece]]] = ()
        self.tensors: Sequence[Tensor] = ()
        self.paths: frozenset[str] = frozenset()
        self.are_whole = False
        self.number = 0

    def look(self, groups: Sequence[dict[str, Any]]) -> HeldParameters:
        """Look them up again if something changed. An engine that flattens parameters may change its own at any time.

        Args:
            groups: The parameter groups of the optimizer.
        """
        if not self._is_same(groups):
            self._look_up(groups)
        return self

    def _is_same(self, groups: Sequence[dict[str, Any]]) -> bool:
        targets = self._targets
        if len(groups) != len(self._groups) or targets.layout.flat:
            return False
        for entry, before in zip(groups, self._groups, strict=True):
            now = entry["params"]
            if len(now) != len(before) or not all(map(is_, now, before)):
                return False
        return targets.changes.number == self._changes

    def _look_up(self, groups: Sequence[dict[str, Any]]) -> None:
        targets, found = self._targets, []
        masters: Collection[int] | None = None
        self._groups = [[*entry["params"]] for entry in groups]
        for number, parameters in enumerate(self._groups):
            for position, parameter in enumerate(parameters):
                pieces = targets.pieces_of(parameter)
                if pieces is None:
                    masters = targets.master_ids() if masters is None else masters
                    path = path_in_optimizer(self._name, number, position)
                    is_other = id(parameter) in masters or id(parameter) in self._of_model
                    pieces = (Piece(path=path),) if is_other else targets.adopt(path, parameter)
                elif not any(is_of_no_module(piece.path) for piece in pieces):
                    self._of_model.add(id(parameter))
                found.append((number, parameter, pieces))
        self._changes = targets.changes.number
        self.all = found
        self.selected = [
            (parameter, chosen)
            for _, parameter, pieces in found
            if (chosen := [piece for piece in pieces if targets.selects(piece.path)])
        ]
        self.tensors = [parameter for parameter, _ in self.selected]
        self.paths = frozenset(piece.path for _, pieces in self.selected for piece in pieces)
        self.are_whole = all(len(pieces) == 1 and pieces[0].shard is None for _, pieces in self.selected)
        self.number += 1
