"""How far a step moves each weight, relative to its size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from traindiff.merging.step_table import Entry, Key
from traindiff.rules.weight_gradients import FEW
from traindiff.summary import nonfinite_count, norm


def weight_updates(table: Mapping[Key, Entry]) -> Iterator[tuple[Entry, float]]:
    """The update of each weight, and its norm as a share of the weight's norm after it.

    Weights have two axes or more: a bias or a norm may rightly be replaced by its first updates.
    """
    for key, update in table.items():
        if key[:2] != ("update", "") or len(update.shape) < 2 or int(update.summary["count"]) < FEW:
            continue
        parameter = table.get(Key("param", "", key.path, "value", 0, 0))
        if parameter is None or parameter.unobserved or nonfinite_count(parameter.summary):
            continue
        size = float(norm(parameter.summary))
        if size and not nonfinite_count(update.summary):
            yield update, float(norm(update.summary)) / size
