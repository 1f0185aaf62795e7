"""NaN and infinities, tensors near the ends of what their dtype holds, and loss scales that cannot prevent it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, ClassVar, NamedTuple

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, RankPart, SiteKey, StepTable, finding_at, is_loss_scale
from traindiff.analyse.rules.optimizers import has_loss_scale, is_left_out
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule, Rule
from traindiff.core.observation import BEFORE, MASTER, SAMPLE
from traindiff.core.site import label
from traindiff.core.summary import LARGEST, finite_count, is_finite, largest, nonfinite_count, number

NEAR = 16.0
"""A tensor may overflow in the next operation if its largest magnitude is within this factor of its dtype's limit."""

NARROW = LARGEST["float16"]
"""In a dtype with this limit or a smaller one, infinities without NaN are numbers that it cannot hold."""

_PASS = frozenset({"batch", "forward", "loss", "backward"})

_OF_ALL = ("batch", "forward", "backward")
"""What the step of the first of several optimizers has of the passes of all."""


class FiniteThroughout(Rule):
    """The first NaN or infinity in execution order: everything observed before it in the step is finite.

    The rule reports it once. It reports another one only if everything was finite in between, except at sites that the
    user ignores (`--ignore`). Of several optimizers, the passes of all are recorded with the step of the first one, so
    what the step of another one shows waits for that. The rule has no limit, because a healthy run has no such number.
    These are not findings:

    * -inf in a batch, in a tensor whose finite elements are all 0 or whose name says mask, and in outputs of modules
      (masked scores), if only finite numbers are computed from it, or if earlier steps had it too;
    * NaN in a part of a batch, and NaN in a buffer from the beginning until it is filled, but not in one of a
      normalization, if outputs of the model and the loss or gradients were observed, and all of them are finite: a
      model may replace missing values, and leave out what was not filled yet. A note says so;
    * gradients of a step that a loss scaler skips, because the scaler detects those itself;
    * infinities in buffers (masks, ranges that were not measured yet), settings of optimizers, limits of clipping, and
    logged numbers.

    transformers' `DebugUnderflowOverflow` sees forward passes only; this rule sees all phases.
    """

    name = "non-finite"
    finds = "The first NaN or infinity in execution order, whose inputs are finite."
    judges_unfinished = True

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._broken: set[SiteKey] = set()  # sites that are not finite since the last finding
        self._ignored: set[SiteKey] = set()  # sites that the user ignores, of which something was found
        self._masks: set[SiteKey] | None = None
        self._replaced: dict[SiteKey, list[int]] = {}  # steps in which the model replaces what is missing there
        self._missing: set[SiteKey] = set()  # sites of missing values in the step before, which the model replaces
        self._unfilled: set[str] = set()  # buffers that are not finite since the training began
        self._begins = True
        self._may_wait = len(self.facts.optimizers) > 1 and any(map(self.facts.observes, _OF_ALL))
        self._waiting: _Origin | None = None

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        found, ignored, masks = self._not_finite(table)
        begins, self._begins = self._begins, False
        if begins:
            self._unfilled = {one.entry.key.path for one in found if self._begins_unfilled(one.entry.key)}
        self._set_missing_aside(table, found, step=step)
        found = [one for one in found if one.entry.key not in self._missing]
        for one in ignored:
            if one.entry.key not in self._ignored:
                self._ignored.add(one.entry.key)
                yield _Origin(suspect=one, table=table, step=step, begins=begins).finding()
        waiting, was_finite = self._waiting, not self._broken
        self._broken = self._still_broken(table) | {one.entry.key for one in found}
        origin: _Origin | None = None
        if found and (was_finite or waiting):
            # -inf where there was none in any step before is no mask.
            fresh = [] if self._masks is None else [one for one in masks if one.entry.key not in self._masks]
            first = min([*found, *fresh], key=lambda one: one.moment)
            set_aside = sorted({"a buffer" if key.slot == "buffer" else "a batch" for key in self._missing})
            words = ["ignored"] * bool(ignored) + [f"missing in {' and '.join(set_aside)}"] * bool(set_aside)
            origin = _Origin(suspect=first, table=table, step=step, begins=begins, set_aside=" or ".join(words))
        elif not found:
            self._masks = (self._masks or set()) | {one.entry.key for one in masks}
        if self._may_wait and not any(key.phase in _OF_ALL for key in table):
            self._waiting = waiting or (origin and origin.without_later())
            return
        if waiting is not None:
            origin = waiting.or_earlier(origin, table)
        self._waiting = None
        if origin is not None:
            yield origin.finding()

    def end(self) -> Iterator[Finding]:
        """What still waits for the passes of a step that was not finished."""
        if self._waiting is not None:
            yield self._waiting.finding()

    def _not_finite(self, table: StepTable) -> tuple[list[_Suspect], list[_Suspect], list[_Suspect]]:
        """The sites that are not finite: those that must be, those of them that the user ignores, and masks."""
        scaled = has_loss_scale(table)
        found: list[_Suspect] = []
        ignored: list[_Suspect] = []
        masks: list[_Suspect] = []
        for key, entry in table.items():
            if not (entry.unobserved or is_finite(entry.summary)):
                if not _is_right(key, entry, scaled=scaled):
                    (ignored if self.facts.ignores(key.path, key.slot) else found).append(_suspect(entry))
                elif key.phase == "forward":
                    masks.append(_suspect(entry))
        return found, ignored, masks

    def _begins_unfilled(self, key: SiteKey) -> bool:
        """True if a site is a buffer before the first step; statistics that are NaN then are never filled."""
        module = self.facts.modules.get(_module(key), "")
        return key.slot == "buffer" and key.stage == BEFORE and "norm" not in module.lower()

    def _set_missing_aside(self, table: StepTable, found: Sequence[_Suspect], *, step: int) -> None:
        """Note where values are missing that the model replaces, as it does if all that it makes of them is finite.

        In a step with another fault, they are those that it replaced in the step before.
        """
        missing = {one.entry.key for one in found if self._is_missing(one)}
        if len(missing) == len(found) and all(_is_replaced(table, key) for key in missing):
            for key in missing:
                self._replaced.setdefault(key, []).append(step)
        else:
            missing &= self._missing
            if len(missing) == len(found) and not is_left_out(table):  # a loss scaler may have found infinities
                missing = set()
        self._missing = missing
        self._unfilled -= {
            key.path for key, entry in sites(table, "param", stage="")
            if key.slot == "buffer" and not entry.unobserved and is_finite(entry.summary)
        }  # fmt: skip

    def _is_missing(self, one: _Suspect) -> bool:
        """True if values may be missing at a site: NaN beside numbers in a batch, or in a buffer that is not filled."""
        key, summary = one.entry.key, one.part.summary if one.part else one.entry.summary
        if key.phase != "batch":
            return key.slot == "buffer" and key.path in self._unfilled
        return int(summary["nan"]) == int(nonfinite_count(summary)) and int(finite_count(summary)) > 0

    def notes(self) -> Iterator[str]:
        """What the model seems to replace."""
        for key, steps in self._replaced.items():
            if key.stage == BEFORE:
                continue
            times = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, first in step {steps[0]}"
            made = "how the batch was made" if key.phase == "batch" else "the initialization"
            yield (
                f"{label(key.path, key.slot)} has NaN in {times}, and the outputs, losses and gradients that were "
                f"observed are finite: the model seems to replace it. If it is not meant, look at {made}."
            )

    def _still_broken(self, table: StepTable) -> set[SiteKey]:
        """The sites that were not finite, unless this step has some of them: it may be that of another optimizer."""
        own = {key for key in self._broken if key.phase != "loss"} or self._broken  # each optimizer has a loss
        return set() if own & table.keys() else self._broken


def _module(key: SiteKey) -> str:
    """The module that gets a batch, or that has a buffer."""
    return key.path if key.phase == "batch" else key.path.rpartition(".")[0]


def _is_replaced(table: StepTable, missing: SiteKey) -> bool:
    """True if a module that gets missing values returns none, and the loss and the gradients are finite."""
    outputs = [entry for key, entry in sites(table, "forward", stage="") if key.path == _module(missing)]
    after = [
        entry for key, entry in sites(table, "loss", "backward", "grad")
        if not entry.unobserved and not is_loss_scale(key)
    ]  # fmt: skip
    observed = not any(one.unobserved for one in outputs) and bool(outputs and after)
    return observed and all(is_finite(one.summary) for one in [*outputs, *after])


class _Suspect(NamedTuple):
    """A non-finite site: its time in the step, the site, and its first non-finite part."""

    moment: tuple[float, int]
    entry: MergedSite
    part: RankPart | None


def _suspect(entry: MergedSite) -> _Suspect:
    known = (part for part in entry.parts if part.summary is not None) if nonfinite_count(entry.summary) else ()
    part = next((part for part in known if nonfinite_count(part.summary)), None)
    if entry.key.stage == "before":
        return _Suspect((-1, entry.order), entry, part)
    # A micro-step's backward pass comes before the next one's forward pass.
    micro_step = part.micro_step if part and entry.key.phase in _PASS else inf
    return _Suspect((micro_step, entry.order), entry, part)


def _is_right(key: SiteKey, entry: MergedSite, *, scaled: bool) -> bool:
    """True if a non-finite site may be correct."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Origin:
    """The first site of a step that is not finite.

    Attributes:
        suspect: The site.
        table: The step.
        step: Its number.
        begins: Whether it is the first step.
        set_aside: What else is not finite and is no finding; empty if nothing is.
    """

    suspect: _Suspect
    table: Mapping[SiteKey, MergedSite]
    step: int
    begins: bool = False
    set_aside: str = ""

    @property
    def order(self) -> int:
        """Its place in the order of execution."""
        return self.suspect.entry.order

    @property
    def micro_step(self) -> float:
        """The micro-step in which it was not finite; of what is no pass, the latest pass before it."""
        moment, entry, _ = self.suspect
        return moment[0] if moment[0] < inf else max((part.micro_step for part in entry.parts), default=0)

    def or_earlier(self, other: _Origin | None, table: StepTable) -> _Origin:
        """The first of this origin, from the step of another optimizer, and one from the passes of all.

        The place of a site is that of its first micro-step. If both are of one micro-step, only a batch is known to
        come before a step of an optimizer: what a pass makes may follow from the parameters that the step left.

        Args:
            other: The other one; None if all passes are finite.
            table: The step of the first optimizer.
        """
        if other is None:
            return self.among(table)
        entry = other.suspect.entry
        if other.micro_step != self.micro_step:
            is_earlier = other.micro_step < self.micro_step
        elif len({part.micro_step for part in entry.parts}) == 1:
            is_earlier = other.order < self.order
        elif entry.key.phase == "batch":
            is_earlier = True
        else:
            return self
        return other if is_earlier else self.among(table)

    def without_later(self) -> _Origin:
        """The same with what was observed before it alone, which may be kept after the step."""
        return replace(self, table={key: entry for key, entry in self.table.items() if entry.order < self.order})

    def among(self, table: StepTable) -> _Origin:
        """The same with what was recorded with the step of another optimizer."""
        return replace(self, table=dict(sorted([*table.items(), *self.table.items()], key=lambda one: one[1].order)))

    def finding(self) -> Finding:
        """The finding."""
        table, (_, origin, part), set_aside = self.table, self.suspect, self.set_aside
        summary = part.summary if part else origin.summary
        nan, count = int(summary["nan"]), int(summary["count"])
        infinite = int(nonfinite_count(summary)) - nan
        before = _before(table, origin)
        what = " and ".join(f"{number} {name}" for number, name in ((nan, "NaN"), (infinite, "infinite")) if number)
        message = f"{label(origin.key.path, origin.key.slot)} has {what} of {count} elements"
        size = 0.0
        if before is None:
            message += f", and nothing {'finite ' if set_aside else ''}was observed before it in the step."
        else:
            size = float(largest(before.summary))
            name = f"{before.key.phase} {label(before.key.path, before.key.slot)}"
            message += f", and all that was observed before it is finite{f' or {set_aside}' if set_aside else ''}, "
            message += f"up to {name} (largest magnitude {size:.3g})."
        evidence = {"nan": nan, "infinite": infinite, "elements": count, "largest_before": size}
        ranks = {one.rank for one in origin.parts}
        sees_forward = any(key.phase in ("forward", "loss") for key in table)
        overflows = _overflows(origin, summary, size)
        message = f"{message} {_advice(origin, overflows=overflows, begins=self.begins, sees_forward=sees_forward)}"
        return finding_at(
            origin, step=self.step, kind="non-finite", message=message, evidence=evidence,
            micro_step=part.micro_step if part and origin.key.phase in _PASS else None,
            rank=part.rank if part and len(ranks) > 1 else None,
        )  # fmt: skip


def _before(table: Mapping[SiteKey, MergedSite], origin: MergedSite) -> MergedSite | None:
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
    """True if numbers seem to be too large for the dtype, rather than wrong."""
    end = LARGEST.get(origin.dtype, inf)
    return size > end / NEAR or (end <= NARROW and not int(summary["nan"]))


def _advice(origin: MergedSite, *, overflows: bool, begins: bool, sees_forward: bool) -> str:
    """Where to look for the cause."""
    key = origin.key
    if key.phase == "batch":
        return "Look at how this batch was made."
    if key.stage == "before" and not begins:
        return "It was written between two steps: look at what updates it."
    if key.stage == "before":
        return "The training begins with it: look at the initialization, or at the checkpoint."
    if key.phase in ("forward", "backward") and overflows:
        return f"{origin.dtype} ends at {LARGEST[origin.dtype]:.5g}: use bfloat16 or float32 here, or smaller numbers."
    if key.phase == "forward":
        return "Look at divisions, logarithms, roots and exponentials in it."
    if key.phase == "loss":
        return "Look at logarithms and divisions in the loss, and at batches of which nothing counts."
    if key.phase in ("backward", "grad"):
        where = "roots and norms at 0, and at 0 x infinity behind a `where`"
        look = f"The forward pass is finite: look at {where}." if sees_forward else (
            f"Its forward pass was not recorded with it (of several optimizers, that is recorded with the step of the "
            f"first one): look there first, then at {where}."
        )  # fmt: skip
        return f"{look} torch.autograd.set_detect_anomaly(True) names the operation."
    if key.slot == "buffer":
        return "A forward pass or the training wrote it: look at divisions and logarithms in what updates it."
    return "The gradients are finite: look at the learning rate, at eps and at the second moments."


class LossScaleSettles(Rule):
    """A loss scaler skips steps although its scale is 1 or less, or it skips too many steps.

    A scaler that begins at 65536 may rightly skip some of the first steps. It halves its scale each time. Later it may
    skip one step in 2000, because it tries a larger scale. At a scale of 1, gradients overflow by themselves, and a
    smaller scale would only lose their small elements. The scale needs 16 skipped steps to fall from 65536 to 1, so 20
    of 40 steps are too many.
    """

    name = "skipped-steps"
    finds = "A loss scaler leaves out most steps, or overflows with a scale of 1 or less."
    needs = "a loss scale"
    kinds = ("skipped-steps", "loss-scale-floor")
    limits: ClassVar[Mapping[str, Limit]] = {
        "floor": Limit(default=1.0, message="scale at which no step may be left out any more"),
        "most": Limit(default=20, message="steps that may be left out in a window"),
        "window": Limit(default=40, message="steps in that window"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return has_loss_scale(contents.table)

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._left_out: deque[bool] = deque(maxlen=max(1, int(self.limit("window"))))
        self._told = False

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        scales = [one for key, one in sites(table, "loss") if is_loss_scale(key) and not one.unobserved]
        left_out = is_left_out(table)
        self._left_out.append(left_out)
        if not left_out or not scales:
            return
        scale = number(scales[0].summary)
        where = _first_overflow(table) or scales[0]
        if scale <= self.limit("floor"):
            message = (
                f"Step {step} is left out although the loss scale is down to {scale:g}: the gradients overflow by "
                f"themselves, first that of {where.key.path}. Look there for what is infinite or NaN; no scale helps."
            )
            yield self.finding(where, message, step=step, kind="loss-scale-floor", scale=scale)
        count = sum(self._left_out)
        if count > self.limit("most") and not self._told:
            self._told = True
            message = (
                f"{count} of the last {len(self._left_out)} steps are left out by the loss scaler, whose scale is "
                f"{scale:g}: the parameters hardly move. The first gradient that is not finite is that of "
                f"{where.key.path}."
            )
            yield self.finding(where, message, step=step, left_out=count, of=len(self._left_out), scale=scale)


def _first_overflow(table: StepTable) -> MergedSite | None:
    """The first gradient in execution order that is not finite."""
    return next(
        (entry for _, entry in sites(table, "backward", "grad") if not (entry.unobserved or is_finite(entry.summary))),
        None,
    )


FILLED = 0.999
"""A value from this share of the largest number on counts as the fill value of a mask (`finfo.min`)."""

_ALWAYS = frozenset({"forward", "param"})
_UNSCALED = frozenset({"backward", "grad"})


class FarFromOverflow(Rule):
    """Activations, gradients or parameters come within a factor of 4 of the largest finite number of their dtype.

    The largest number of float16 is 65504, and activations of a healthy transformer are below about 1000. If an element
    is within a factor of 4 of the largest number, it can double only twice. The rule ignores gradients that are
    multiplied by a loss scale, because the scaler raises the scale until they overflow. It also ignores elements that
    equal the largest number, because masks are filled with it.
    """

    name = "near-overflow"
    finds = "A tensor comes near the largest number of its dtype."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "headroom": Limit(
            default=4.0, message="how many times larger a tensor must be able to become; 4 leaves two doublings"
        ),
    }

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        headroom = self.limit("headroom")
        phases = _ALWAYS if has_loss_scale(table) else _ALWAYS | _UNSCALED
        for key, entry in sites(table, *phases):
            if entry.unobserved:
                continue
            end = LARGEST.get(entry.dtype)
            if end is None or not is_finite(entry.summary):
                continue  # another rule finds overflows
            ends = (-float(entry.summary["minimum"]), float(entry.summary["maximum"]))
            size = entry.factor * max((one for one in ends if one < FILLED * end), default=0.0)
            if size * headroom < end:
                continue
            message = (
                f"{label(key.path, key.slot)} reaches {size:.3g}, and {entry.dtype} ends at {end:.5g}: "
                f"{end / size:.2g} x as much is infinite. Use bfloat16 or float32 here, or find what makes it so large."
            )
            yield self.finding(entry, message, step=step, largest=size, end=end)


FEW = 64
"""Nonzero elements below which a share says little."""


class FarFromUnderflow(RepeatedRule):
    """Most nonzero elements of a gradient are subnormal in their own dtype.

    Subnormal numbers have fewer digits the smaller they are (in float16 below 6e-5, down to 6e-8), and smaller numbers
    become 0. Loss scaling prevents it (Micikevicius et al., Mixed Precision Training, 2018). A tail of small elements
    is normal; half of a tensor is not.
    """

    name = "underflow"
    finds = "Most elements of a gradient are subnormal in its dtype: smaller ones become 0."
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, message="share of the elements that are not zero that may be subnormal"),
        "least_steps": Limit(
            default=3, message="steps in a row in which it must be so; one batch may have no gradient"
        ),
    }

    def _wrong(self, table: StepTable) -> Found:
        found: Found = {}
        for key, entry in sites(table, "backward", "grad", stage=""):
            if entry.unobserved or not entry.exact:
                continue
            subnormal = int(entry.summary["subnormal"])
            if not subnormal:
                continue
            present = int(finite_count(entry.summary)) - int(entry.summary["zero"])
            if present >= FEW and subnormal > self.limit("share") * present:
                found[key] = (entry, {"share": subnormal / present})
        return found

    def _message(self, row: Repeated) -> str:
        key = row.site.key
        return (
            f"{row.numbers['share']:.0%} of the elements of the gradient of {label(key.path, key.slot)} that are not "
            f"zero are subnormal in {row.site.dtype}, in {row.num_steps} steps: smaller ones are lost. Use a loss "
            "scale (GradScaler), a larger one, or bfloat16."
        )
