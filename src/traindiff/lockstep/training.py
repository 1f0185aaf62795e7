"""Train all sides on one batch, one after the other, as if each were alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from traindiff.lockstep.batch_guard import BatchGuard
from traindiff.lockstep.copies import follow_settings
from traindiff.lockstep.live_side import LiveSide, noted
from traindiff.lockstep.random_state import RandomState


def train_all(sides: Sequence[LiveSide], batch: Any, guard: BatchGuard, *, where: str) -> None:
    """The baseline first, and the candidate last. Each begins with the same random state, and all with the same batch.

    Afterwards generators go on from where the baseline has left them.

    Args:
        sides: Baseline, candidate, and copies of the baseline.
        batch: What to train on.
        guard: Keeps the batch as it came.
        where: Which batch, and on which rank, for what an error says.

    Raises:
        LockstepError: A side has changed the batch in place.
    """
    baseline, candidate, *copies = sides
    follow_settings(baseline.stepped, [one.stepped for one in copies])
    guard.begin(batch)
    before = after = RandomState.now()
    for side in (baseline, *copies, candidate):
        if side is not baseline:
            before.restore()
        with noted(f"traindiff.Lockstep: raised in the step of the {side.stepped.name}, in {where}."):
            side.step(guard.given())
        guard.end(side.stepped.name)
        if side is baseline:
            after = RandomState.now()
    after.restore()
    guard.release()
