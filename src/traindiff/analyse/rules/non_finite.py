"""The first non-finite tensor of a run, whose inputs were still finite."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any, NamedTuple

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable, finding_at, is_loss_scale
from traindiff.analyse.rules.learning_rates import has_loss_scale
from traindiff.analyse.rules.rule import Rule
from traindiff.core.observation import MASTER, SAMPLE
from traindiff.core.site import label
from traindiff.core.summary import LARGEST, largest, nonfinite_count

NEAR = 16.0
"""A tensor may overflow in the next operation if its largest magnitude is within this factor of its dtype's limit."""

NARROW = LARGEST["float16"]
"""In a dtype with this limit or a smaller one, infinities without NaN are numbers that it cannot hold."""

_PASS = frozenset({"batch", "forward", "loss", "backward"})


class FiniteThroughout(Rule):
    """The first NaN or infinity in execution order: everything observed before it in the step is finite.

    It is found once. What follows from it is not found again, unless everything is finite in between. There is no
    limit: the first non-finite number is one too many. These are not findings:

    * -inf in a batch, in a tensor whose finite elements are all 0 or whose name says mask, and in outputs of modules
    (masked scores), if only finite numbers follow from it, or if it was there in steps before;
    * gradients of a step that a loss scaler leaves out: it is there to find those;
    * infinities in buffers (masks, ranges that were not measured yet), settings of optimizers, limits of clipping, and
    logged numbers.

    This replaces `DebugUnderflowOverflow` of transformers, which sees forward passes only.
    """

    name = "non-finite"
    finds = "The first NaN or infinity in execution order, whose inputs are finite."
    judges_unfinished = True

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._last_was_finite = True
        self._masks: set[SiteKey] | None = None

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        scaled = has_loss_scale(table)
        found: list[_Suspect] = []
        masks: list[_Suspect] = []
        for key, entry in table.items():
            if not entry.unobserved and nonfinite_count(entry.summary):
                if not _is_right(key, entry, scaled=scaled):
                    found.append(_suspect(entry))
                elif key.phase == "forward":
                    masks.append(_suspect(entry))
        was_finite, self._last_was_finite = self._last_was_finite, not found
        if found and was_finite:
            # -inf where there was none in any step before is no mask.
            fresh = [] if self._masks is None else [one for one in masks if one.entry.key not in self._masks]
            first = min([*found, *fresh], key=lambda one: one.moment)
            yield _finding(table, first.entry, first.part, step=step)
        elif not found:
            self._masks = (self._masks or set()) | {one.entry.key for one in masks}


class _Suspect(NamedTuple):
    """A non-finite site: its time in the step, the site, and its first non-finite part."""

    moment: tuple[float, int]
    entry: MergedSite
    part: RankPart | None


def _suspect(entry: MergedSite) -> _Suspect:
    part = next((part for part in entry.parts if nonfinite_count(part.summary)), None)
    if entry.key.stage == "before":
        return _Suspect((-1, entry.order), entry, part)
    # A micro-step's backward pass comes before the next one's forward pass.
    micro_step = part.micro_step if part and entry.key.phase in _PASS else inf
    return _Suspect((micro_step, entry.order), entry, part)


def _is_right(key: SiteKey, entry: MergedSite, *, scaled: bool) -> bool:
    """Whether a non-finite site may be correct."""
    summary = entry.summary
    only_masks = not int(summary["nan"]) and not int(summary["positive_infinity"])
    if key.phase == "update" or key.stage in (SAMPLE, "clipped") or key.group or key.slot == "logged":
        return True
    if is_loss_scale(key) or (key.phase == "param" and key.slot not in ("value", MASTER)):
        return not int(summary["nan"])
    if key.phase == "batch":
        zero = float(summary["minimum"]) == float(summary["maximum"]) == 0.0
        return only_masks and (zero or "mask" in key.slot)
    if key.phase == "forward":
        return only_masks
    if key.phase == "loss":
        return entry.factor != 1.0 and not int(summary["nan"])  # the loss scale made it overflow
    return scaled and key.phase in ("backward", "grad")


def _finding(table: StepTable, origin: MergedSite, part: RankPart | None, *, step: int) -> Finding:
    summary = part.summary if part else origin.summary
    nan, count = int(summary["nan"]), int(summary["count"])
    infinite = int(nonfinite_count(summary)) - nan
    before = _before(table, origin)
    what = " and ".join(f"{number} {name}" for number, name in ((nan, "NaN"), (infinite, "infinite")) if number)
    message = f"{label(origin.key.path, origin.key.slot)} has {what} of {count} elements"
    size = 0.0
    if before is None:
        message += ", and nothing was observed before it."
    else:
        size = float(largest(before.summary))
        name = f"{before.key.phase} {label(before.key.path, before.key.slot)}"
        message += f", and all that was observed before it is finite, up to {name} (largest magnitude {size:.3g})."
    evidence = {"nan": nan, "infinite": infinite, "elements": count, "largest_before": size}
    ranks = {one.rank for one in origin.parts}
    message = f"{message} {_advice(origin, overflows=_overflows(origin, summary, size))}"
    return finding_at(
        origin, step=step, kind="non-finite", message=message, evidence=evidence,
        micro_step=part.micro_step if part and origin.key.phase in _PASS else None,
        rank=part.rank if part and len(ranks) > 1 else None,
    )  # fmt: skip


def _before(table: StepTable, origin: MergedSite) -> MergedSite | None:
    """The last finite tensor before the origin: one of its inputs, if the order tells."""
    found = None
    for key, entry in table.items():
        if entry.order >= origin.order:
            break
        numbers = entry.dtype in LARGEST and key.stage != SAMPLE and not key.group and not entry.unobserved
        if numbers and entry.exact and not nonfinite_count(entry.summary):
            found = entry
    return found


def _overflows(origin: MergedSite, summary: Any, size: float) -> bool:
    """Whether numbers seem to be too large for the dtype, rather than wrong."""
    end = LARGEST.get(origin.dtype, inf)
    return size > end / NEAR or (end <= NARROW and not int(summary["nan"]))


def _advice(origin: MergedSite, *, overflows: bool) -> str:
    """Where to look for the cause."""
    key = origin.key
    if key.phase == "batch":
        return "Look at how this batch was made."
    if key.stage == "before":
        return "The training begins with it: look at the initialization, or at the checkpoint."
    if key.phase in ("forward", "backward") and overflows:
        return f"{origin.dtype} ends at {LARGEST[origin.dtype]:.5g}: use bfloat16 or float32 here, or smaller numbers."
    if key.phase == "forward":
        return "Look at divisions, logarithms, roots and exponentials in it."
    if key.phase == "loss":
        return "Look at logarithms and divisions in the loss, and at batches of which nothing counts."
    if key.phase in ("backward", "grad"):
        return (
            "The forward pass is finite: look at roots and norms at 0, and at 0 x infinity behind a `where`. "
            "torch.autograd.set_detect_anomaly(True) names the operation."
        )
    return "The gradients are finite: look at the learning rate, at eps and at the second moments."
