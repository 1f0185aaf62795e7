"""What all hooks of one watch share."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from traindiff.observe.common.progress import Progress
from traindiff.observe.torch.nonfinite.early_warnings import EarlyWarnings
from traindiff.observe.torch.nonfinite.judging import Judging
from traindiff.observe.torch.nonfinite.reading import Reader, Reading, is_declared, is_mask
from traindiff.observe.torch.session.observations import Containment


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchContext:
    """The state that the hooks of one watch share.

    Attributes:
        progress: Where the training is.
        containment: Guards hooks.
        reader: Reads tensors.
        judging: Judges them.
        masks: Globs over sites that may hold -inf.
        nonfinite: Globs over sites that may hold NaN and any infinity.
        meant: Sites at which this step had NaN or infinity that is meant.
        early_warnings: Warns of numbers that may soon be NaN or infinite, or be lost.
        keeps_inputs: Keep what modules are given until their backward pass, or the end of the step.
        weights: What was last read of parameters, by canonical path.
        order: How many calls had been made when a module was last called, by its path: the backward pass runs the other
            way round.
    """

    progress: Progress
    containment: Containment
    reader: Reader
    judging: Judging
    masks: tuple[str, ...]
    nonfinite: tuple[str, ...]
    early_warnings: EarlyWarnings
    keeps_inputs: bool
    weights: dict[str, Reading] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
    meant: dict[str, None] = field(default_factory=dict)

    def is_meant(self, site: str, reading: Reading, tensor: Tensor | None) -> bool:
        """True if NaN or infinity at a site is meant: in a mask, or as declared there or where else the tensor was."""
        reading.is_meant |= is_declared(site, self.nonfinite)
        if not (reading.is_meant or is_mask(site, reading, tensor, declared=self.masks)):
            return False
        self.meant[site] = None
        return True
