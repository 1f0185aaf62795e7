"""What a step was given to move parameters by: learning rates, and whether a loss scaler left it out."""

from __future__ import annotations

from collections.abc import Mapping

from traindiff.merging.loss_scale import is_loss_scale
from traindiff.merging.step_table import Entry, Key
from traindiff.observation import SKIPPED
from traindiff.summary import nonfinite_count, number


def may_be_left_out(table: Mapping[Key, Entry]) -> bool:
    """Whether a loss scaler has left the step out, or may have: it does that where any gradient is not finite."""
    return any(
        (key.phase == "optimizer" and key.slot == SKIPPED)
        or (key[:2] == ("grad", "") and not entry.unobserved and nonfinite_count(entry.summary))
        for key, entry in table.items()
    )


def is_left_out(table: Mapping[Key, Entry]) -> bool:
    """Whether a loss scaler has left the step out: it is marked, or there is a scale and a gradient is not finite.

    A fused optimizer leaves steps out itself, and sets no mark.
    """
    if any(key.phase == "optimizer" and key.slot == SKIPPED for key in table):
        return True
    return has_loss_scale(table) and may_be_left_out(table)


def has_loss_scale(table: Mapping[Key, Entry]) -> bool:
    """Whether the loss of the step was multiplied by a loss scale."""
    return any(is_loss_scale(key) for key in table)


def learning_rates(table: Mapping[Key, Entry]) -> dict[str, float]:
    """Learning rates by the path of their group."""
    return {
        key.path: number(entry.summary)
        for key, entry in table.items()
        if key.group and key == Key("optimizer", "", key.path, "lr", 0, 0)
    }


def moves_parameters(table: Mapping[Key, Entry]) -> bool:
    """Whether the optimizer was to move anything: no loss scaler left the step out, and some learning rate is not 0.

    Where no learning rate was recorded, that is taken for granted.
    """
    rates = learning_rates(table)
    return not may_be_left_out(table) and (not rates or any(rates.values()))
