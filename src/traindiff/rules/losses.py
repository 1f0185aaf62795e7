"""The loss of a step, where there is one."""

from __future__ import annotations

import math
from collections.abc import Mapping

from traindiff.merging.step_table import Entry, Key
from traindiff.summary import number

_LOSS = Key("loss", "", "loss", "backward", 0, 0)


def loss_of(table: Mapping[Key, Entry]) -> tuple[Entry, float] | None:
    """What `backward` was called on, relative to the global loss.

    None where it was not observed, is not finite, or where the step has several: what each of them is, is not known.
    """
    entry = table.get(_LOSS)
    if entry is None or entry.unobserved or _LOSS._replace(call=1) in table:
        return None
    value = number(entry.summary)
    return (entry, value) if math.isfinite(value) else None
