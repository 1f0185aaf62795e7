"""The state of a comparison after the steps so far: how much sites differ, and which faults only one run has."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from traindiff.analyse.align import exact
from traindiff.analyse.align.returned_states import check_state
from traindiff.analyse.align.side import RUNS
from traindiff.analyse.compare.bits import bit_difference
from traindiff.analyse.compare.moved_moments import KIND as SYSTEMATIC
from traindiff.analyse.compare.other_loss import SEEN_AT
from traindiff.analyse.compare.site_rows import SiteRows
from traindiff.analyse.compare.step_input import StepInput
from traindiff.analyse.compare.uncalled import is_uncalled
from traindiff.analyse.findings import UNJUDGED, Finding, SiteWord, word_of
from traindiff.analyse.merge.distance import Pair, are_near, difference, equal_bits, same_bits, size_of
from traindiff.analyse.merge.history import DifferenceHistory
from traindiff.analyse.merge.indexed import indexed, sites
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import GRADIENT_NORM, MergedSite, SiteKey, StepTable
from traindiff.analyse.noise.run_floors import RunFloors
from traindiff.analyse.noise.tolerance import Tolerances
from traindiff.analyse.rules import RULES, RunFacts
from traindiff.analyse.rules.edits import OptimizersAloneChangeParameters
from traindiff.analyse.rules.lost_updates import UpdatesSurviveRounding, is_another_update
from traindiff.analyse.rules.replay import replayed_paths
from traindiff.analyse.rules.run_judge import RunJudge
from traindiff.analyse.rules.witness import GradientsFollow
from traindiff.core.observation import BEFORE, EDITED, REPLAYED, WITNESS
from traindiff.core.site import label
from traindiff.core.witness import EXPECTED

FOLLOWS = 0.05
"""If all gradients together differ by more than this part of the activations' difference, they may follow from it."""

_LEARNING = frozenset({"loss", "grad", "update"})
"""Phases that tell what a training learns."""


OTHER_FORM = "other_form"
"""Evidence of a batch that holds the same samples, padded or ordered otherwise."""


def comes_last(finding: Finding) -> bool:
    """True if a finding matters only if something else differs too: if it did, that would show in what follows it."""
    return is_uncalled(finding) or bool(finding.evidence.get(OTHER_FORM))


class Judge:
    """Holds the results for two runs after the steps so far: findings, differences, and the numbers for later floors.

    Args:
        tolerance: Tolerance of the user, which replaces the floors.
        forced: True if the candidate's tensors were replaced by the baseline's after each operation.
        coefficients: Relative error that the optimizers' own coefficients may have.
        approximate: Paths of modules of which one run alone has a kernel that approximates.
        reduced_in: The shorter dtype in which a run reduces a gradient over its ranks, by the path of its parameter.
        history: Records every difference, if a report will show them.
        optimizers: Their names. Steps of others are judged before the step of the first one in which they are taken,
            and which shows initial parameters and inputs.

    Attributes:
        run: Numbers that determine the floors of later steps.
        sites: Largest difference of each site so far, in units of its floor.
        all_equal: True if every pair so far is known to hold the same bits.
        first_bit_difference: The first site whose bits are known to differ.
        unknown_bits: Sites whose bits the recordings do not tell, in the order in which they were first seen.
        every_bit: Whether any bit that differs is a finding in the current step.
        unjudged: By site that follows from the first divergence, and whose floor hides everything: the first step.
        parted: Largest difference of all parameters before any finding, by the two recorded steps between which steps
            that were not recorded led to it.
        previous: The baseline's summaries in the step before of each optimizer, or in the evaluation of the loss
            before, by its name and by site.
        of_step_before: Those that are of the step before although there was an evaluation since.
        nan_in_both: Places at which both runs hold the same NaN.
        rounded: Relative difference of parameters that start with values that rounding parts, by path.
        turned: Places where a choice that rounding may change, such as a router's, selected another number of rows.
        choices: Places where rounding turned a part of a router's choices, and how many.
        computed: By input that differs and is no other batch: the first step in which it differs, and why.
        absent: Paths of parameters that one run does not train; their further differences are not reported.
        other_loss: Whether a loss differed by more than noise.
        uncalled: Paths of modules that only one run calls.
        regrouped: Paths of modules that the runs call on other parts of the same batch.
        loss_of_one_run: Whether only one run has a loss: the other asks for its gradients in another way.
    """

    def __init__(
        self,
        tolerance: Tolerances | None,
        *,
        forced: bool = False,
        coefficients: float = 0.0,
        approximate: Collection[str] = (),
        reduced_in: Mapping[str, str] = MappingProxyType({}),
        history: DifferenceHistory | None = None,
        optimizers: Sequence[str] = (),
    ) -> None:
        self._others = frozenset(optimizers[1:])
        self._latest = "", -1  # optimizer and number of the step
        self._of_others: set[tuple[SiteKey, str]] = set()  # found in steps of others since the first one's step before
        self._bits_of_others = False  # whether so was the first difference in bits
        self.tolerance = tolerance
        self.forced = forced
        self.run = RunFloors(coefficients=coefficients, approximate=approximate, reduced_in=reduced_in)
        self.sites = SiteRows()
        self.all_equal = True
        self.first_bit_difference: Finding | None = None
        self.unknown_bits: dict[SiteKey, None] = {}
        self.every_bit = False
        self._first_bits: tuple[SiteKey, int] | None = None  # the first difference in bits, if it is a finding
        self.unjudged: dict[SiteKey, int] = {}
        self.parted: dict[tuple[int | None, int], float] = {}
        self.previous: dict[str, dict[SiteKey, Any]] = {}
        self.of_step_before: dict[str, frozenset[SiteKey]] = {}
        self.nan_in_both: list[str] = []
        self.rounded: dict[str, float] = {}
        self.turned: list[str] = []
        self.choices: list[str] = []
        self.computed: dict[str, tuple[int, str]] = {}
        self.absent: set[str] = set()
        self.other_loss = False
        self.uncalled: set[str] = set()
        self.regrouped: Collection[str] = ()
        self.loss_of_one_run = False
        self._history = history
        self._found: dict[tuple[SiteKey, str], Finding] = {}
        self._counted: dict[tuple[SiteKey, str], tuple[str, int]] = {}  # optimizer and step that were counted last

    def check_batch(self, pair: Pair, given: StepInput) -> tuple[Finding | None, float, float]:
        """What is wrong with an input of a root, how far it is apart, and how far it may be."""
        finding = exact.check_batch(pair, step=given.step, samples=given.batches)
        if finding is None:
            return None, 0.0 if equal_bits(pair) else difference(pair) or 0.0, exact.rounding_apart(pair)
        rows = ((key, row) for key, row in self.sites.weightiest.items() if key.phase == "forward")
        noise = max((row.difference for _, row in rows if row.ratio <= 1.0 or self._found), default=0.0)
        found = check_state(pair, finding, given.sources, noise=noise)
        if isinstance(found, Finding):
            return found, math.inf, 0.0
        self.computed.setdefault(label(pair.baseline.key.path, pair.baseline.key.slot), (given.step, found))
        apart = size_of(pair)
        return None, apart, apart

    def remember(self, optimizer: str, entries: Iterable[MergedSite], *, whole: bool = True) -> None:
        """Note what the baseline computed in a step of an optimizer, whether that was compared or not.

        If not `whole`, that is an evaluation of the loss before the last one. It may have no gradients of its own.
        """
        computed = {
            entry.key: entry.summary
            for entry in entries
            if entry.key.phase in ("forward", "backward", "grad", "optimizer") and not entry.unobserved
        }
        before = {} if whole else self.previous.get(optimizer, {})
        self.of_step_before[optimizer] = frozenset(before) - frozenset(computed)
        self.previous[optimizer] = {**before, **computed}

    @property
    def findings(self) -> tuple[Finding, ...]:
        """All findings so far, in execution order: each site once, with its number of steps.

        Modules that one run does not call, and batches that are padded or ordered otherwise, come last: if that
        matters, what follows them differs.
        """
        return tuple(sorted(self._found.values(), key=comes_last))

    def begin(self, optimizer: str, step: int) -> None:
        """Begin to judge a step of an optimizer."""
        if (optimizer, step) != self._latest and not self._is_of_other:
            self._of_others.clear()
            self._bits_of_others = False
        self._latest = optimizer, step
        self.sites.optimizer = optimizer

    @property
    def _is_of_other(self) -> bool:
        """True if the step is not of the first optimizer, with which is recorded what all were given."""
        return self._latest[0] in self._others

    def add(self, found: Iterable[Finding]) -> None:
        """Note the findings of a step. What it was given comes before what other optimizers made of it."""
        known = len(self._found)
        for finding in found:
            key = SiteKey(finding.phase, finding.stage, finding.path, finding.slot, finding.call)
            own = finding.kind in ("hyper-parameter", "reported-norm")
            site = (key, finding.kind if own else OTHER_FORM if finding.evidence.get(OTHER_FORM) else "")
            first = self._found.get(site, finding)
            count = first.evidence.get("num_steps", 0) if site in self._found else 0
            latest = (self.sites.optimizer, finding.step)
            count += self._counted.get(site) != latest  # a step may evaluate the loss several times
            self._counted[site] = latest
            self._found[site] = replace(first, evidence={**first.evidence, "num_steps": count})
        new = list(islice(self._found.items(), known, None))
        if self._is_of_other:
            self._of_others.update(site for site, _ in new)
        elif (first_site := self.first_site) in self._of_others:
            place = self._found[first_site].order
            ahead = {site: one for site, one in new if one.kind in exact.EXACT_KINDS and one.order < place}
            self._found = {**ahead, **self._found}

    @property
    def first_site(self) -> tuple[SiteKey, str] | None:
        """What tells the first of `findings` from others; None if there is none but those that come last."""
        return next((site for site, one in self._found.items() if not comes_last(one)), None)

    @property
    def only_representation_differs(self) -> bool:
        """True if only activations, calls of modules, or the order of samples or channels differ.

        In a forced run only calls of modules may differ. Any other difference is an operation that is wrong by itself.
        """
        agrees = self.learning_agrees or (self.loss_of_one_run and self.gradients_agree)
        if not self._found or not agrees or self.tolerance is not None or self._first_bits:
            return False
        sizes = [found.difference for found in self._found.values() if math.isfinite(found.difference)]
        if sizes and self.run.learning_apart > FOLLOWS * min(1.0, max(sizes)):
            return False  # noise may hide that the gradients follow; what differs by 1 or more has nothing in common
        return all(map(self._is_representation, self._found.values()))

    @property
    def learning_agrees(self) -> bool:
        """True if losses, gradients and updates were compared, and none of them differs.

        What is within its floor agrees, unless a finding before it may have raised that floor.
        """
        has_raised = not all(map(comes_last, self._found.values()))
        return self.learning_compared and not (has_raised and self.run.learning_differs)

    @property
    def learning_compared(self) -> bool:
        """True if losses, gradients and updates were compared."""
        return self._phases >= _LEARNING

    @property
    def gradients_agree(self) -> bool:
        """True if gradients and updates were compared and agree, and at most calls of modules differ.

        Then a loss that was not compared leaves nothing open.
        """
        return self._phases >= _LEARNING - {"loss"} and all(map(is_uncalled, self._found.values()))

    @property
    def observed_bits_agree(self) -> bool:
        """True if losses, gradients or updates were compared, and all observed tensors have the same bits."""
        return self.all_equal and not self._found and not self._phases.isdisjoint(_LEARNING)

    @property
    def _phases(self) -> set[str]:
        return {key.phase for key in self.sites.weightiest}

    def _is_representation(self, finding: Finding) -> bool:
        if is_uncalled(finding):
            return True
        if self.forced:
            return False  # its inputs are the baseline's, so no other representation explains it
        if finding.kind in exact.EXACT_KINDS:
            # Positions and masks have another shape where the samples are padded or packed otherwise.
            same = finding.path in self.regrouped or any(one.evidence.get("same") for one in self.findings)
            return bool(finding.evidence.get("permuted") or (finding.evidence.get("reshaped") and same))
        if finding.kind in ("missing", "extra", "non-finite", "shape", "recomputed", SYSTEMATIC):
            return False
        if finding.phase == "loss":  # gradients may be handed on by losses of another value
            return "losses" in finding.evidence or SEEN_AT in finding.evidence
        return finding.phase in ("forward", "backward") or finding.path in self.run.permuted

    def floor(self, pair: Pair, floor: float) -> float:
        """The floor of a pair, or the user's tolerance in its place."""
        chosen = self._chosen_floor(pair)
        return floor if chosen is None else chosen

    def is_judged_by_user(self, pair: Pair) -> bool:
        """True if the user's tolerance takes the place of a pair's floor."""
        return self._chosen_floor(pair) is not None

    def _chosen_floor(self, pair: Pair) -> float | None:
        counter = pair.baseline.key.slot == "step"
        return None if self.tolerance is None or counter else self.tolerance.floor(pair)

    @property
    def judges_parameters(self) -> bool:
        """True if parameters themselves are judged after a step."""
        return self.tolerance is not None and self.tolerance.judges_parameters

    def size(self, pair: Pair) -> float | None:
        """The difference of a pair; see `traindiff.analyse.merge.distance.difference`."""
        return math.inf if self.is_broken(pair) else difference(pair)

    def is_broken(self, pair: Pair) -> bool:
        """True if a pair holds NaN or infinities that are findings by themselves."""
        if self.tolerance is None or not self.tolerance.non_finite_fails:
            return False
        activation = pair.baseline.key.phase in ("forward", "backward")
        counts = ("nan",) if activation else ("nan", "positive_infinity", "negative_infinity")
        return any(int(entry.summary[name]) for entry in (pair.baseline, pair.candidate) for name in counts)

    def see_bits(self, pair: Pair, step: int, *, micro_steps: int) -> bool:
        """Note whether a pair holds the same bits; pairs must be given in execution order.

        Returns:
            True if it is the first of all whose bits are known to differ, and any bit counts.
        """
        key = pair.baseline.key
        if key.phase == "update" or key == GRADIENT_NORM:
            return False  # follows from other sites
        same = same_bits(pair)
        self.all_equal = self.all_equal and bool(same)
        if same is None:
            self.unknown_bits.setdefault(key)
        if same is not False:
            return False
        first = self.first_bit_difference
        comes_before = not self._is_of_other and self._bits_of_others
        if first is not None and not (comes_before and pair.baseline.order < first.order):
            return False
        self._bits_of_others = self._is_of_other
        self.first_bit_difference = bit_difference(pair, step, micro_steps=micro_steps)
        self._first_bits = (key, step) if self.every_bit else None
        return self.every_bit

    def note(self, pair: Pair, step: int, size: float, floor: float, undisturbed: float) -> None:
        """Remember the weightiest difference of a site, and all of them for a report.

        Args:
            pair: The site.
            step: The step.
            size: Relative L2 difference; inf if it has no size.
            floor: Noise floor, from the differences measured at the inputs.
            undisturbed: The same for inputs that agree within noise.
        """
        key, same = pair.baseline.key, same_bits(pair)
        equal = bool(same) or (same is None and size == 0.0)
        if equal:
            word: SiteWord = "identical"
        elif self.every_bit and self._first_bits and same is False and not size > floor:
            is_first = self._first_bits == (key, step)
            undisturbed, word = 0.0, "above" if is_first else "follows"
            floor = 0.0 if is_first else floor
        else:
            word = word_of(size, floor, min(undisturbed, floor))
        if word == "follows" and floor >= UNJUDGED:
            self.unjudged.setdefault(key, step)
        if self._history is not None:
            self._history.note(pair, step, size, floor, word)
        self.sites.note(
            pair.baseline, step, (size, floor, min(undisturbed, floor)), word, equal=equal, other_bits=same is False
        )


LENIENT = 2.0
"""A fault that shows half as clearly in the other run counts for both, so it does not tell them apart."""

_NO_NAMES = frozenset({"A", "Activation", "An", "Rank", "Ranks", "Stage", "The"})
"""Words that begin a sentence with a capital letter, and have none within it."""


class BothRuns:
    """Judges each of two runs by the rules.

    Runs whose steps are the same so far, and of which the same is known, are judged once.

    Args:
        facts: Facts about each run.
        common: By run, a function that turns its paths into those that both have in common.

    Attributes:
        shared: Faults of both runs, which do not tell them apart: one sentence per kind.
    """

    def __init__(self, facts: Sequence[RunFacts], common: Sequence[Rename] = (str, str)) -> None:
        self._common = common
        rules = [rule for rule in RULES if rule.tells_runs_apart]
        self._strict = [RunJudge(rules, one) for one in facts]
        sizes = [rule for rule in rules if rule.judges_sizes]
        self._lenient = [RunJudge(sizes, one, strictness=LENIENT) for one in facts]
        self.shared: dict[str, str] = {}
        self._facts = facts
        self._alike = facts[0] == facts[1]

    @property
    def unknown(self) -> list[str]:
        """One sentence for each thing that rules could not judge, and the comparison judges by the other run."""
        return [
            f"{name}: {_within(reason)}, so it is judged by the other run only."
            for name, judge in zip(RUNS, self._judges(self._strict), strict=True)
            for reason in judge.unknown
        ]

    def findings(
        self, tables: Sequence[StepTable], first: Sequence[StepTable] = (), *, step: int, same: bool = False
    ) -> list[Finding]:
        """Faults of one run that the other does not have, labeled with the run.

        Args:
            tables: The step in both runs; of several evaluations of the loss, the last one.
            first: The first evaluation, which shows parameters as the step finds them; `tables`, if left out.
            step: Its number.
            same: Both tables hold the same.
        """
        if not same:
            self._part()
        if self._alike:
            tables = tables[:1]
        tables = self._without_unseen_edits([*map(indexed, tables)], first or tables)
        for judge, table in zip(self._strict, tables, strict=False):
            judge.note_unknown(table)
        strict = [judge.step(table, step=step) for judge, table in zip(self._strict, tables, strict=False)]
        lenient = [judge.step(table, step=step) for judge, table in zip(self._lenient, tables, strict=False)]
        if self._alike:
            strict, lenient = strict * 2, lenient * 2
        # What is found strictly counts as well: a rule may explain away leniently what it finds strictly.
        known = [
            {(one.kind, common(path)) for one in (*own, *more) for path in (one.path, *one.evidence.get("paths", ()))}
            for own, more, common in zip(strict, lenient, self._common, strict=True)
        ]
        return [
            replace(
                one, message=f"In the {RUNS[run]}, {_within(one.message)}", evidence={**one.evidence, "run": RUNS[run]}
            )
            for run in (0, 1)
            for one in strict[run]
            if self._is_of_one_run(one, run, tables, known[1 - run])
        ]

    def _without_unseen_edits(self, tables: Sequence[StepTable], first: Sequence[StepTable]) -> Sequence[StepTable]:
        """The tables without changes before the step of what the other run shows only as the step finds it.

        That run begins with this step, or has left out the one before: it does not tell whether anything changed. It
        does where it finds other values.
        """
        if len(tables) < 2:
            return tables
        found = []
        for run, own in enumerate(tables):
            edits, common = sites(own, "param", stage=EDITED), self._common[1 - run]
            if not edits:  # as a rule
                found.append(own)
                continue
            edited = {common(key.path) for key, _ in sites(tables[1 - run], "param", stage=EDITED)}
            shown = {
                path: one for key, one in sites(first[1 - run], "param", stage=BEFORE)
                if key.slot == "value" and (path := common(key.path)) not in edited
            }  # fmt: skip
            hidden = {key for key, one in edits if are_near(one, shown.get(self._common[run](key.path)))}
            found.append(indexed({key: one for key, one in own.items() if key not in hidden}) if hidden else own)
        return found

    def learn(self, facts: RunFacts) -> None:
        """Judge later steps of the candidate with facts that have become known since."""
        if self._alike and facts == self._facts[0]:
            return
        self._part()
        for judges in (self._strict, self._lenient):
            judges[1].learn(facts)

    def _part(self) -> None:
        """Judge each run by itself from now on."""
        if self._alike:
            for judges in (self._strict, self._lenient):
                judges[1] = deepcopy(judges[0], {id(self._facts[0]): self._facts[1]})
            self._alike = False

    def _is_of_one_run(self, one: Finding, run: int, tables: Sequence[StepTable], other: set[tuple[str, str]]) -> bool:
        """True if a fault of one run is known not to be one of the other run, whose faults are given."""
        common = self._common[run], self._common[1 - run]
        both = tables[min(run, len(tables) - 1)], tables[min(1 - run, len(tables) - 1)]
        path = common[0](one.path)
        if (one.kind, path) in other:
            self.shared.setdefault(one.kind, f"In both runs: {_within(one.message)}")
            return False
        if one.kind == UpdatesSurviveRounding.name and (
            path in {path for _, path in other} or is_another_update(one, both, common)
        ):
            return False  # the other run has a worse finding there, or does not compute this update
        if one.stage == REPLAYED and path not in map(common[1], replayed_paths(both[1])):
            self._note_alone(one, run, f"update was not replayed in step {one.step}")
            return False
        if lacks := _not_recorded(one, self._facts[1 - run]):
            self._note_alone(one, run, lacks)
            return False
        if one.kind == GradientsFollow.name and not _is_witnessed(both[1], common[1], path):
            self._note_alone(one, run, f"gradient was not witnessed in step {one.step}")
            return False
        return True

    def _note_alone(self, one: Finding, run: int, lacks: str) -> None:
        """Note a fault of one run that the other run, which lacks what is judged, may have as well."""
        message = f"In the {RUNS[run]}, {_within(one.message)}"
        why = f"The {RUNS[1 - run]}'s {lacks}: this does not tell the runs apart."
        self.shared.setdefault(f"{one.kind} alone", f"{message} {why}")

    def _judges(self, judges: Sequence[RunJudge]) -> Sequence[RunJudge]:
        """Of both runs."""
        return (judges[0], judges[0]) if self._alike else judges


def _not_recorded(one: Finding, other: RunFacts) -> str:
    """What another run did not record that a fault would show in; empty if it recorded all."""
    if one.kind == OptimizersAloneChangeParameters.name:
        if one.phase == "optimizer":
            return "" if other.observes("witness") else "optimizer state between the steps was not recorded"
        return "" if other.sees_changes else "parameters between the steps were not recorded"
    return "" if other.observes(one.phase, one.stage) else f"{one.phase} was not recorded"


def _is_witnessed(table: StepTable, common: Callable[[str], str], path: str) -> bool:
    """True if it is known what the gradient with a path should be."""
    return any(
        key.stage == WITNESS and key.slot == EXPECTED and common(key.path) == path and not entry.unobserved
        for key, entry in table.items()
    )


def _within(sentence: str) -> str:
    """A sentence as it stands after other words; names of classes and parameters stay as they are."""
    first, space, rest = sentence.partition(" ")
    return f"{first.lower() if first in _NO_NAMES else first}{space}{rest}"
