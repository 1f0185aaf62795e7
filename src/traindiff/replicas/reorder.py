"""A replica in which sums are added up in another order."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from traindiff.replicas.dispatch import Dispatching
from traindiff.replicas.permutations import Permutations
from traindiff.replicas.reordered_operators import reordered_operators
from traindiff.taps.sink import Sink


class ReorderReplica:
    """Permutes what matrix products, convolutions, normalisations, softmax, sums and means sum over.

    Forward and backward, in every operator of the thread that trains; other operators, integers and
    tensors of subclasses (DTensor) are computed as ever.

    Args:
        seed: Another seed permutes in another way.
    """

    def __init__(self, seed: int) -> None:
        self._order = Permutations(seed)
        self._operators = reordered_operators()

    def attach(self, sink: Sink) -> ExitStack:
        """See `traindiff.replicas.replica.Replica`."""
        return Dispatching(self._compute, sink).enter()

    def _compute(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        reordered = self._operators.get(operator)
        if reordered is None or not _can_be_rounded(args):
            return operator(*args, **kwargs)
        return reordered(self._order, operator, list(args), kwargs)


def _can_be_rounded(args: tuple[Any, ...]) -> bool:
    first = args[0]
    plain = all(type(arg) in (Tensor, nn.Parameter) for arg in args if isinstance(arg, Tensor))
    return plain and (first.is_floating_point() or first.is_complex()) and first.dim() > 0 and not first.is_sparse
