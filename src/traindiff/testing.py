"""Use traindiff in tests: `assert_equivalent`, and golden recordings for pytest (traindiff explain testing).

Also `formula`, which declares how an optimizer of your own changes parameters, and `newton_schulz`, a function for the
formulas of optimizers such as Muon (traindiff explain replay); it needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from traindiff.observe.common.user_formulas import formula
from traindiff.run.testing.equivalence import assert_equivalent
from traindiff.run.testing.golden import Golden

if TYPE_CHECKING:
    from traindiff.observe.torch.replay.muon import newton_schulz

__all__ = ["Golden", "assert_equivalent", "formula", "newton_schulz"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name == "newton_schulz":
        from traindiff.observe.torch.replay.muon import newton_schulz

        return newton_schulz
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
