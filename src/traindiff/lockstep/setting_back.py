"""Set the candidate back to the baseline's state."""

from __future__ import annotations

from traindiff.lockstep.live_side import LiveSide
from traindiff.lockstep.ranks import Ranks


def set_back(baseline: LiveSide, candidate: LiveSide, ranks: Ranks) -> list[str]:
    """Placeholder until the state of sides is known."""
    raise NotImplementedError
