"""True if an optimizer does what its own settings say, judged from one run's replayed updates."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import best_fit
from traindiff.analyse.merge.indexed import once, sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.optimizers import learning_rates
from traindiff.analyse.rules.orthogonal import divided_updates
from traindiff.analyse.rules.replayed_mistakes import is_a_method, meaning
from traindiff.analyse.rules.rule import Limit, Rule
from traindiff.core.observation import REPLAYED
from traindiff.core.summary import distance, finite_count, largest, norm_of

LIMIT = 2.0
"""Largest residual that is not a finding, in units of what rounding allows.

A correct optimizer stays below 1 by construction; measured over SGD, Adam and AdamW, for-loop, foreach and fused,
float32 and bfloat16: 0.98.
"""

LOST_SHARE = 0.5
"""Share of the elements that should move and do not, above which updates are called lost."""

MOST_OTHERS = 3
"""Further mistakes that a message mentions, if they would do the same in this step."""

COMPILED = "compiled"
"""What stands behind an optimizer whose step ran in compiled code."""

FEW = 16
"""Elements below which a share says little."""

MOST_RATES = 1000
"""Learning rates of each group that are remembered, to name the step of a stale one."""

EXACT = 1e-6
"""Relative difference within which two learning rates are the same: they may be stored in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The replay of one parameter (of a range of it, if it is large).

    Attributes:
        key: Of the residual.
        order: Place in execution order: that of the update.
        value: The update that the formula gives.
        taken: The update that was made.
        rounding: Largest difference of the two that rounding allows, per element.
        residual: Their difference, in units of that.
        variants: The same for each known mistake that explains it better, likelier ones first.
        dtype: The parameter's dtype; empty if it was not recorded.
    """

    key: SiteKey
    order: int
    value: MergedSite
    taken: MergedSite
    rounding: MergedSite
    residual: MergedSite
    variants: Mapping[str, MergedSite]
    dtype: str

    @property
    def worst(self) -> float:
        """Largest residual of an element."""
        return float(largest(self.residual.summary))

    @property
    def optimizer(self) -> str:
        """The optimizer, as the subject of a sentence."""
        name, _, rule = self.key.slot.removesuffix(")").partition("(")
        if rule == COMPILED:
            return f"{name} (compiled)"
        if rule and rule != name:
            return f"{name} (a subclass of {rule} with a step of its own)"
        return f"{name} (with a step of its own)" if rule else name

    @property
    def may_mean_it(self) -> bool:
        """True if an update that no known mistake explains may be right.

        That is so for a class with a step of its own, and for a compiled step, whose parameters other code may have
        changed before they were read.
        """
        return "(" in self.key.slot

    @property
    def is_read_late(self) -> bool:
        """True if other code may have put parameters back before they were read."""
        return self.key.slot.endswith(f"({COMPILED})")

    @property
    def has_own_step(self) -> bool:
        """True for a known optimizer or a subclass of one, with a step of its own."""
        return self.may_mean_it and not self.is_read_late

    @property
    def lost_share(self) -> float:
        """Share of the elements that the formula moves and that did not move; 0 if they are few."""
        return self._still_share if self._num_moving >= FEW else 0.0

    @property
    def _still_share(self) -> float:
        still, resting = int(self.taken.summary["zero"]), int(self.value.summary["zero"])
        return max(0, still - resting) / max(1, self._num_moving)

    @property
    def _num_moving(self) -> int:
        """The number of elements that the formula moves."""
        return int(finite_count(self.value.summary)) - int(self.value.summary["zero"])

    @property
    def never_moved(self) -> bool:
        """True if no element has moved."""
        return int(self.taken.summary["zero"]) == int(self.taken.summary["count"])

    @property
    def is_masked(self) -> bool:
        """True if some elements have moved, and most have not."""
        return not self.never_moved and self._still_share > LOST_SHARE

    def fitting(self, limit: float) -> list[str]:
        """Known mistakes that leave nothing to explain; of a step of its own, those that may not be meant."""
        known = self._explaining(limit)
        return [name for name in known if not is_a_method(name)] if self.has_own_step else known

    def methods(self, limit: float) -> list[str]:
        """Other methods that leave nothing to explain."""
        return [name for name in self._explaining(limit) if is_a_method(name)]

    def _explaining(self, limit: float) -> list[str]:
        return [name for name, entry in self.variants.items() if float(largest(entry.summary)) <= limit]


@dataclass(slots=True, kw_only=True)
class _OwnMethod:
    """An optimizer with a step of its own that does not do what the optimizer does that it is made from.

    Attributes:
        first: The first step in which that was seen.
        steps: All of them.
        methods: How many of its updates each known method explains.
    """

    first: int
    steps: set[int] = field(default_factory=set)
    methods: Counter[str] = field(default_factory=Counter)

    def note(self, methods: Iterable[str], step: int) -> None:
        """Note an update."""
        self.steps.add(step)
        self.methods.update(methods)

    @property
    def what(self) -> str:
        """What it does, in words that follow its name."""
        count = f"{len(self.steps)} replayed step{'s' if len(self.steps) > 1 else ''}, first {self.first}"
        if not self.methods:
            return f"does not move parameters by the formula of that optimizer ({count})"
        ((method, _),) = self.methods.most_common(1)
        return f"moves parameters {meaning(method)} ({count})"


class UpdatesFollowSettings(Rule):
    """An optimizer did not move parameters as its formula and its settings say.

    If an optimizer has a `step` of its own, as subclasses of torch's optimizers may have, its findings are warnings: it
    may be a variant on purpose. But if it moves some parameters and leaves out others, that is a finding, unless it
    leaves out most elements of most parameters that it moves, too: it may have a mask of elements.
    """

    name = "update-rule"
    finds = "The optimizer does something else than its settings say."
    kinds = ("update-rule", "never-updated")
    tells_runs_apart = True
    judges_sizes = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "residual": Limit(
            default=LIMIT,
            message="how many roundings an update may be away from its replay; right optimizers stay below 1",
        ),
    }

    def begin(self) -> None:
        """No learning rate was seen so far."""
        self._rates: dict[
            str, dict[float, int]
        ] = {}  # by group: the step in which each was used last, latest ones last
        self._own: dict[str, _OwnMethod] = {}  # by optimizer
        self._told: set[str] = set()  # optimizers of which a mistake is known

    def step(self, table: StepTable, *, step: int) -> list[Finding]:
        """Findings of a step."""
        limit = self.limit("residual")
        least = limit / self.strictness
        wrong = [one for one in replayed(table) if one.worst > least]
        moving = _moving_whole(replayed(table)) if wrong else frozenset[str]()
        votes = Counter(name for one in wrong for name in one.fitting(limit))
        now = learning_rates(table)
        found = [
            _wrong(one, votes, self._earlier(one, now), others_move=one.optimizer in moving, step=step, limit=limit)
            for one in wrong
        ]
        for one, finding in zip(wrong, found, strict=True):
            if finding is not None:
                self._told.add(one.optimizer)
            elif one.has_own_step:
                self._own.setdefault(one.optimizer, _OwnMethod(first=step)).note(one.methods(limit), step)
        for path, rate in now.items():
            rates = self._rates.setdefault(path, {})
            rates.pop(rate, None)
            rates[rate] = step
            if len(rates) > MOST_RATES:
                del rates[next(iter(rates))]
        told = {one.key.path for one in wrong if one.worst > limit}
        found += [one for one in _wrong_states(table, step=step, limit=least) if one.path not in told]
        found += divided_updates(table, self.facts.held_in, step=step)
        return sorted((one for one in found if one is not None), key=lambda finding: finding.order)

    def notes(self) -> Iterator[str]:
        """What optimizers with steps of their own do instead of what the optimizers do that they are made from."""
        for optimizer, one in self._own.items():
            if optimizer in self._told:
                continue
            yield (
                f"{optimizer} {one.what}. This may be what it is for, so it was not judged. "
                "To have it judged, declare its formula (`traindiff.testing.formula`)."
            )

    def _earlier(self, one: Replayed, now: Mapping[str, float]) -> dict[float, int]:
        """By factor to the learning rate of the parameter: the step before in which it had this factor."""
        groups = self.facts.held_in.get(one.key.path, frozenset())
        if len(groups) != 1:
            return {}
        (group,) = groups
        rate = now.get(group, 0.0)
        return {other / rate: step for other, step in self._rates.get(group, {}).items() if rate}

    def unknown(self, table: StepTable) -> list[str]:
        """Why whole optimizers were not replayed, as the recording says it."""
        parameters = {key.path for key, _ in sites(table, "grad", "param")}
        reasons = {
            entry.unobserved
            for key, entry in sites(table, "update", stage=REPLAYED)
            if entry.unobserved and key.path not in parameters
        }
        return [f"An optimizer is {reason}" for reason in sorted(reasons)]


def _moving_whole(updates: Sequence[Replayed]) -> Set[str]:
    """The optimizers that move parameters, and leave out most elements of at most half of these."""
    moved = Counter(one.optimizer for one in updates if not one.never_moved)
    masked = Counter(one.optimizer for one in updates if one.is_masked)
    return {optimizer for optimizer, count in moved.items() if 2 * masked[optimizer] <= count}


@once
def replayed(table: StepTable) -> Sequence[Replayed]:
    """The replayed parameters of a step, in execution order."""
    found = []
    variants: dict[tuple[str, str], dict[str, MergedSite]] = {}
    residuals: list[tuple[SiteKey, MergedSite]] = []
    for key, entry in sites(table, "update"):
        if key.stage.startswith("variant["):
            variants.setdefault((key.path, key.slot), {})[key.stage[len("variant[") : -1]] = entry
        elif key.stage == "residual" and not entry.unobserved:
            residuals.append((key, entry))
    for key, entry in residuals:
        parts = [_beside(table, key, stage) for stage in (REPLAYED, "taken", "rounding")]
        value, taken, rounding = parts
        if value is None or taken is None or rounding is None:
            continue
        parameter = table.get(SiteKey("param", "", key.path, "value"))
        found.append(
            Replayed(
                key=key, order=parameter.order if parameter else entry.order, value=value, taken=taken,
                rounding=rounding, residual=entry,
                variants=variants.get((key.path, key.slot), {}), dtype=parameter.dtype if parameter else "",
            )
        )  # fmt: skip
    return found


def replayed_paths(table: StepTable) -> set[str]:
    """The parameters whose updates were replayed in a step: in the first ones of a recording, and in some later."""
    return {one.key.path for one in replayed(table)}


_STATE = "state["


def _wrong_states(table: StepTable, *, step: int, limit: float) -> Iterator[Finding]:
    """States that are not what the formula gives after a step, of parameters that moved as it says."""
    for key, entry in sites(table, "update"):
        if not key.stage.startswith(_STATE) or "=" in key.stage or entry.unobserved:
            continue
        worst = float(largest(entry.summary))
        if worst <= limit:
            continue
        name = key.stage[len(_STATE) : -1]
        beside = {why: _beside(table, key, f"{_STATE}{name}={why}]") for why in ("kept", "zero")}
        why = next((why for why, one in beside.items() if one is not None and float(largest(one.summary)) <= 1.0), "")
        what = {"kept": "leaves it as it was", "zero": "leaves it 0"}.get(why, "makes something else of it")
        message = (
            f"{key.slot} keeps {name} of {key.path} for later steps, and {what}: what its settings ask for is up to "
            f"{worst:.3g} roundings away. The update of this step is right, and later ones follow from that state."
        )
        yield Finding(
            step=step, phase="update", stage=REPLAYED, path=key.path, slot="update", order=entry.order,
            kind="update-rule", message=message,
            evidence={"state": name, "residual": worst, "variant": f"state-{why or 'other'}"},
        )  # fmt: skip


def _beside(table: StepTable, key: SiteKey, stage: str) -> MergedSite | None:
    """Another stage of the same replay; ranks that agree on it have it once."""
    key = key._replace(stage=stage)
    return table.get(key) or table.get(key._replace(micro_step=0))


def _wrong(
    one: Replayed, votes: Counter[str], earlier: Mapping[float, int], *, others_move: bool, step: int, limit: float
) -> Finding | None:
    """The finding for an update that rounding does not explain.

    Args:
        one: The replay.
        votes: The number of parameters that each mistake explains.
        earlier: By factor, the earlier step whose learning rate was so many times that of this step.
        others_move: Whether its optimizer moves other parameters in this step, and has no mask of their elements.
        step: The step.
        limit: The largest residual that is right. What explains an update leaves no more.
    """
    path, size, apart = one.key.path, norm_of(one.value.summary), _apart(one)
    evidence: dict[str, Any] = {"residual": one.worst, "replayed_norm": size}
    kind = "update-rule"
    off = f"What its settings ask for is up to {one.worst:.3g} roundings away"
    rests = one.never_moved or one.lost_share > LOST_SHARE
    if rests and one.is_read_late:
        return None
    if rests:
        what = f"never moves {path}" if one.never_moved else f"leaves {one.lost_share:.0%} of {path} as it was"
        message = (
            f"{one.optimizer} {what}: its settings ask for an update of norm {size:.3g}, and the largest "
            f"element of it is {one.worst:.3g} x what rounding to {one.dtype or 'the parameter'} could lose."
        )
        kind, evidence["share"] = "never-updated", 1.0 if one.never_moved else one.lost_share
    elif fitting := _likely(one, limit):
        name, *others = _closest(one, fitting, votes)
        left = float(largest(one.variants[name].summary))
        message = f"{one.optimizer} moves {path} {meaning(name)}. {off}, this {left:.2g}."
        evidence |= {"variant": name, "residual_of_variant": left}
        if others:
            message += f" This step does not tell it from: {'; '.join(map(meaning, others[:MOST_OTHERS]))}."
            evidence["or_variants"] = others
    elif (factor := _factor(one, limit)) is not None:
        stale = _step_with(factor, earlier, within=limit * norm_of(one.rounding.summary) / norm_of(one.taken.summary))
        where = "" if stale is None else f", which is that of step {stale}"
        message = f"{one.optimizer} moves {path} as if the learning rate were {factor:.4g} x what it is{where}. {off}."
        evidence |= {"variant": "lr", "factor": factor} | ({} if stale is None else {"step_of_rate": stale})
    elif one.may_mean_it:
        return None
    else:
        other = f"something else than its settings ask for, {apart:.2g} of its size off"
        message = f"{one.optimizer} moves {path} by {other}. {off}."
    if one.has_own_step and not (one.never_moved and others_move):
        message += " Is this meant? Then declare its formula (`traindiff.testing.formula`), and it is judged by that."
        evidence["may_be_meant"] = True
    return Finding(
        step=step, phase="update", stage=REPLAYED, path=path, slot="update", order=one.order, kind=kind,
        difference=apart, floor=apart * limit / one.worst if math.isfinite(apart) else 0.0,
        message=message, evidence=evidence,
    )  # fmt: skip


def _likely(one: Replayed, limit: float) -> list[str]:
    """Known mistakes that explain an update; another gradient only if another learning rate does not."""
    fitting = one.fitting(limit)
    others = [name for name in fitting if not name.startswith("gradient x ")]
    return others if others or _factor(one, limit) is not None else fitting


def _closest(one: Replayed, fitting: list[str], votes: Counter[str]) -> list[str]:
    """The mistakes that most parameters share, if they leave at most twice the least residual; likelier ones first.

    A value of a setting that is that of elsewhere, e.g. of another group, is one mistake.
    """
    shared = [name for name in fitting if votes[name] == max(votes[name] for name in fitting)]
    left = {name: norm_of(one.variants[name].summary) for name in shared}
    found: dict[str, str] = {}
    for name in shared:
        if left[name] <= 2.0 * min(left.values()):
            found.setdefault(name.partition(" (of ")[0], name)
    return list(found.values())


def _factor(one: Replayed, limit: float) -> float | None:
    """The factor between the update that was made and the right one, if that explains it."""
    factor, left_over = best_fit(one.value, one.taken)
    left = left_over * math.sqrt(float((one.taken.summary["sketch"] ** 2).sum()))
    allowed = limit * norm_of(one.rounding.summary) * max(1.0, abs(factor))
    return factor if factor and left <= allowed and int(one.value.summary["count"]) >= FEW else None


def _step_with(factor: float, earlier: Mapping[float, int], *, within: float) -> int | None:
    """The earlier step whose learning rate explains a factor; None if none does, or several."""
    near = [step for other, step in earlier.items() if abs(other - factor) <= max(within, EXACT) * abs(factor)]
    return near[0] if len(near) == 1 else None


def _apart(one: Replayed) -> float:
    size = norm_of(one.value.summary)
    return float(distance(one.value.summary, one.taken.summary)) / size if size else math.inf
