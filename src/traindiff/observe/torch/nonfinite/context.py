"""What all hooks of one watch share."""

from __future__ import annotations

from dataclasses import dataclass, field

from traindiff.observe.common.progress import Progress
from traindiff.observe.torch.nonfinite.early_warnings import EarlyWarnings
from traindiff.observe.torch.nonfinite.judging import Judging
from traindiff.observe.torch.nonfinite.reading import Reader, Reading
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
    early_warnings: EarlyWarnings
    keeps_inputs: bool
    weights: dict[str, Reading] = field(default_factory=dict)
    order: dict[str, int] = field(default_factory=dict)
