"""Optimizers that divide by a moment of the gradient: how what they keep and do follows from gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from traindiff.merging.step_table import Key

LINEAR_STATE = frozenset({"momentum_buffer", "step"})
"""State slots of optimizers whose update is linear in the gradient."""

FIRST_MOMENTS = frozenset({"exp_avg", *LINEAR_STATE})
"""State slots that are linear in the gradient; others hold squares of it."""


def is_quotient(key: Key, adaptive: Collection[str]) -> bool:
    """Whether this is something that an optimizer has divided by a moment: an update, or a state that adds up updates.

    Args:
        key: Of the site.
        adaptive: Parameters whose optimizer keeps a moment that it divides by.
    """
    if key.path not in adaptive:
        return False
    # RMSprop's momentum is over what was divided, and so is what Adadelta accumulates.
    return key.phase in ("update", "param") or (
        key.phase == "optimizer" and key.slot in ("momentum_buffer", "acc_delta")
    )


def adaptive_parameters(keys: Iterable[Key]) -> set[str]:
    """Parameters whose optimizer keeps a moment that it divides by."""
    return {key.path for key in keys if key.phase == "optimizer" and key.slot not in LINEAR_STATE and not key.group}
