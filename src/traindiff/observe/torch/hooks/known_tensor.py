"""What is known of a tensor that comes in each step: all of its row but where the step is, and the numbers.

The slow way defines what is recorded: `Observations.emit`. It returns the row that it has made if a tensor that looks
the same gives the same row again, and `KnownTensor` keeps of that row what does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from traindiff.core.kernels.store import SummaryStore
from traindiff.core.observation import Observation, is_of_evaluation
from traindiff.core.torch_compat.alike import looks_like_one
from traindiff.observe.torch.sharding.layout import Layout, is_before_unscaling


class KnownTensor:
    """One tensor that comes in each step.

    Attributes:
        layout: How this rank's tensors lay; what is known holds for this object.
        looks: Tells whether a tensor looks like the one from which this was learned.
        row: The row of that one.
        has_scale: Whether it contains the loss scale, if there is one.
        of_evaluation: Whether it belongs to one evaluation of the loss.
        write: Writes the summary of such a tensor to memory, given the addresses of both; None where that takes more.
    """

    __slots__ = ("has_scale", "layout", "looks", "of_evaluation", "row", "write")

    def __init__(self, row: Observation, looks: Callable[[Any], bool], layout: Layout, write: Any) -> None:
        self.layout = layout
        self.looks = looks
        self.row = row
        self.has_scale = is_before_unscaling(phase=row.phase, stage=row.stage, slot=row.slot)
        self.of_evaluation = is_of_evaluation(row.phase, row.stage)
        self.write = write


def known_tensor(row: Observation, tensor: Tensor, layout: Layout, store: SummaryStore) -> KnownTensor | None:
    """What is known of a tensor from its row; None if this torch cannot tell quickly how a tensor looks."""
    looks = looks_like_one(tensor)
    return None if looks is None else KnownTensor(row, looks, layout, store.writer(tensor, row.shard))
