"""The base of all rules, and the facts that a rule knows of a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.parameters import Groups, parameter_groups
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import MergedSite, StepTable, finding_at
from traindiff.analyse.products import ProductCheck
from traindiff.core.maps.accepted import Accepted, names_of
from traindiff.core.tap_registry import OBSERVABLE, asked_for_as, shows
from traindiff.storage import Joined, Run, ended, joined


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts that do not change during a run.

    Attributes:
        complete: Whether all parameters of a single optimizer were recorded, on all ranks.
        modules: Class name of each module by path.
        holders: Paths of the modules that have no forward pass: what they hold is used by the module around them.
        tied: Path of a parameter by each of its further names.
        parameters: Paths of all parameters.
        trainable: Paths of the parameters that require a gradient.
        held_in: Paths of the groups of recorded optimizers that hold a parameter (`optimizer.groups[0]`), by its path.
        optimizers: Class name of each recorded optimizer by name.
        own_steps: Names of the optimizers whose `step` is neither torch's nor that of an engine.
        settings: Settings of each module when recording began, as texts by name, by path.
        autocast: The dtype to which autocast converted before the first forward pass with gradients; empty if it was
            off, or not recorded.
        observed: What was recorded, as in `record(observe=...)`.
        sees_changes: Whether each change of a parameter between two steps was recorded, on all ranks.
        errors: The errors that ended ranks, by rank; not interrupts by users.
        num_ranks: Number of ranks that were recorded.
        engine: What divides the batch over ranks and reduces gradients, as in `run.json`; empty without ranks.
        has_hook: Whether a communication hook replaces the engine's reduction.
        not_reduced: Paths of the parameters that the engine was told to ignore: each rank has its own.
        ignored: Sites at which the user ignores what is found.
        reduced_in: The shorter dtype in which the engine reduces a gradient, by the path of its parameter.
        joined: Steps for which ranks had no inputs, by rank.
    """

    complete: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)
    holders: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)
    parameters: frozenset[str] = frozenset()
    trainable: frozenset[str] = frozenset()
    held_in: Mapping[str, frozenset[str]] = field(default_factory=dict)
    optimizers: Mapping[str, str] = field(default_factory=dict)
    own_steps: frozenset[str] = frozenset()
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    autocast: str = ""
    observed: frozenset[str] = frozenset()
    sees_changes: bool = False
    errors: Mapping[int, str] = field(default_factory=dict)
    num_ranks: int = 1
    engine: str = ""
    has_hook: bool = False
    not_reduced: frozenset[str] = frozenset()
    reduced_in: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[int, Sequence[Joined]] = field(default_factory=dict)
    ignored: tuple[Accepted, ...] = ()

    def observes(self, phase: str, stage: str = "") -> bool:
        """True if this stage of a phase was recorded, as far as it is known what was."""
        what = asked_for_as(phase, stage)
        return what not in OBSERVABLE or shows(self.observed, what)

    def ignores(self, path: str, slot: str) -> bool:
        """True if the user ignores what is found at a site."""
        return any(entry.names(names_of(path, slot)) for entry in self.ignored)


def run_facts(recording: Run, rename: Rename = str) -> RunFacts:
    """Facts about a run; `rename` turns its paths into those of the run's tables."""
    contents = [recording.rank_content(rank) for rank in recording.ranks]
    everything = recording.run["settings"].get("select", ["*"]) == ["*"] and not recording.missing_ranks
    one_optimizer = all(len(content.get("optimizers", ())) == 1 for content in contents)
    return RunFacts(
        complete=everything and one_optimizer and bool(contents),
        modules={rename(path): name for one in contents for path, name in one.get("modules", {}).items()},
        holders=frozenset(rename(path) for one in contents for path in one.get("holders", ())),
        tied={rename(other): rename(path) for one in contents for other, path in one.get("tied", {}).items()},
        parameters=frozenset(rename(path) for one in contents for path in one.get("parameters", {})),
        trainable=_parameters_with("requires_grad", contents, rename),
        held_in=_held_in(parameter_groups(recording, rename)),
        settings={
            rename(path): settings for one in contents for path, settings in one.get("module_settings", {}).items()
        },
        autocast=_autocast(contents),
        engine=str((recording.run.get("mesh") or {}).get("engine") or ""),
        has_hook=bool((recording.run.get("mesh") or {}).get("communication_hook")),
        not_reduced=_parameters_with("not_reduced", contents, rename),
        reduced_in={
            rename(path): about["reduced_in"]
            for one in contents
            for path, about in one.get("parameters", {}).items()
            if "reduced_in" in about
        },
        observed=frozenset(recording.run["settings"].get("observe", ())),
        sees_changes=bool(contents) and all(one.get("sees_changes_between_steps") for one in contents),
        optimizers={one["name"]: one["type"] for content in contents for one in content.get("optimizers", ())},
        own_steps=frozenset(
            one["name"] for content in contents for one in content.get("optimizers", ()) if one.get("own_step")
        ),
        errors={
            rank: error
            for rank, content in zip(recording.ranks, contents, strict=True)
            if (error := ended(content).error) and "KeyboardInterrupt" not in error
        },
        num_ranks=len(recording.ranks),
        joined={
            rank: found for rank, content in zip(recording.ranks, contents, strict=True) if (found := joined(content))
        },
    )


def _autocast(contents: Sequence[Mapping[str, Any]]) -> str:
    """The dtype to which autocast converts, if it is the same for all kinds of device that have one."""
    found = {
        dtype
        for one in contents
        for dtype in one.get("surroundings", {}).get("autocast", {}).values()
        if dtype != "off"
    }
    return found.pop() if len(found) == 1 else ""


def _parameters_with(flag: str, contents: Sequence[Mapping[str, Any]], rename: Rename) -> frozenset[str]:
    """Paths of the parameters that have a flag on some rank."""
    return frozenset(
        rename(path) for one in contents for path, about in one.get("parameters", {}).items() if about.get(flag)
    )


def _held_in(groups: Groups) -> dict[str, frozenset[str]]:
    """Paths of the groups that hold a parameter, by its path."""
    found: dict[str, frozenset[str]] = {}
    for name, parameters in groups.items():
        for number, paths in enumerate(parameters):
            for path in paths:
                found[path] = found.get(path, frozenset()) | {f"{name}.groups[{number}]"}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A number that a rule holds a run against.

    Attributes:
        default: Its value if the user sets none.
        message: Its meaning, its unit and the reason for the default: a phrase after its name.
    """

    default: float
    message: str


@dataclass(frozen=True)
class Contents:
    """What a step has, for rules that ask if it has anything that they judge.

    Attributes:
        table: The step.
        facts: Facts about the run.
        products: The matrix products of the step.
    """

    table: StepTable
    facts: RunFacts
    products: Sequence[ProductCheck] = ()

    @cached_property
    def stages(self) -> frozenset[str]:
        """Stages of all its sites."""
        return frozenset(key.stage for key in self.table)

    @cached_property
    def slots(self) -> frozenset[str]:
        """Slots of all its sites."""
        return frozenset(key.slot for key in self.table)


LEAST_STEPS = "least_steps"
"""Limit of rules that find nothing in a run of fewer steps."""


class Rule:
    """A rule that a run must keep by itself. One object judges one run, step by step, in order.

    A rule overrides the methods that it needs: most need `step` only. Sentences begin with a capital letter.

    Args:
        facts: Facts about the run.
        strictness: Divides the rule's limits: 2 finds faults half as large.
        limits: Set by the user, in place of the defaults, by name.
    """

    name: ClassVar[str]
    """The name by which users choose it."""

    finds: ClassVar[str]
    """A sentence about what it finds."""

    needs: ClassVar[str] = ""
    """What a run must have, or have recorded, for it to judge anything, as a noun phrase; empty if every run has it."""

    kinds: ClassVar[tuple[str, ...]] = ()
    """Kinds of its findings (traindiff explain findings); its name, unless it says otherwise."""

    limits: ClassVar[Mapping[str, Limit]] = {}
    """Limits that users can set, by name."""

    warns: ClassVar[bool] = False
    """True if its findings are warnings, which leave a run healthy."""

    judges_unfinished: ClassVar[bool] = False
    """True if it also judges the last step of a run that ended before the optimizer was called."""

    tells_runs_apart: ClassVar[bool] = False
    """True if `traindiff compare` asks it too. Most faults it finds by itself, and better."""

    judges_sizes: ClassVar[bool] = False
    """True if its findings depend on `strictness`. `traindiff compare` asks other rules only once."""

    def __init_subclass__(cls) -> None:
        if not cls.kinds and hasattr(cls, "name"):
            cls.kinds = (cls.name,)

    def __init__(self, facts: RunFacts, *, strictness: float = 1.0, limits: Mapping[str, float] | None = None) -> None:
        self.facts = facts
        self._strictness = strictness
        self._chosen = limits or {}
        self.begin()

    def begin(self) -> None:
        """Set up the state that the rule keeps from step to step: little, and not more with every step."""

    def learn(self, facts: RunFacts) -> None:
        """Judge later steps with facts that have become known since; what follows from them is worked out anew."""
        self.facts = facts

    @property
    def strictness(self) -> float:
        """What the rule divides a limit by where it tells what is wrong, and not where it tells what explains that."""
        assert self.judges_sizes, "a rule says that it uses it"
        return self._strictness

    def limit(self, name: str) -> float:
        """One of `limits`, as the user or the rule sets it."""
        return self._chosen.get(name, self.limits[name].default)

    def finding(self, entry: MergedSite, message: str, *, step: int, kind: str = "", **evidence: Any) -> Finding:
        """A finding of the rule at a site; its kind is the first of `kinds` if none is given."""
        return finding_at(entry, step=step, kind=kind or self.kinds[0], message=message, evidence=evidence)

    def is_warning(self, finding: Finding) -> bool:
        """True if one of its findings is a warning, which leaves a run healthy.

        A finding has `may_be_meant` in its evidence if the training does that, and nothing tells that it is not meant.
        """
        return self.warns or bool(finding.evidence.get("may_be_meant"))

    def applies(self, contents: Contents) -> bool:  # noqa: ARG002
        """True if a step has something that it judges, which `needs` names."""
        return True

    def why_unjudged(self) -> str:
        """Why it judges nothing of the run after all, as a sentence without full stop; empty if it judges it."""
        return ""

    def step(self, table: StepTable, *, step: int) -> Iterable[Finding] | None:  # noqa: ARG002
        """Findings of a step; None if there are only findings of the whole run.

        Args:
            table: The step; empty again when the next step begins, so keep no part of it.
            step: Its number.
        """
        return None

    def products(self, checks: Sequence[ProductCheck], *, step: int) -> Iterable[Finding]:  # noqa: ARG002
        """Findings at the matrix products of a step."""
        return ()

    def unknown(self, table: StepTable) -> Iterable[str]:  # noqa: ARG002
        """Why the rule cannot judge a part of a step: sentences that hold for the whole run."""
        return ()

    def end(self) -> Iterable[Finding]:
        """Findings that only the whole run shows."""
        return ()

    def notes(self) -> Iterable[str]:
        """Sentences about a finished run that are worth knowing, and may be intended."""
        return ()


@dataclass(slots=True, kw_only=True)
class Repeated:
    """A fault that lasts for several steps in a row.

    Attributes:
        key: Tells it from other faults that the same rule finds.
        site: Where it is.
        numbers: Its evidence, from the first step.
        first: The first step.
        num_steps: Number of steps.
    """

    key: Hashable
    site: MergedSite
    numbers: Mapping[str, Any]
    first: int
    num_steps: int = 0


Found = dict[Hashable, tuple[MergedSite, dict[str, Any]]]
"""Faults in a step: by a key that stays the same from step to step, the site and the numbers."""


class RepeatedRule(Rule, ABC):
    """A rule about faults that last for at least `least_steps` steps in a row (one of its limits)."""

    def begin(self) -> None:
        """Nothing was found so far."""
        self._running: dict[tuple[str, Hashable], Repeated] = {}
        self._kept: dict[tuple[str, Hashable], Repeated] = {}

    def step(self, table: StepTable, *, step: int) -> None:
        """Count how long faults last; the findings come at the end."""
        found = self._wrong(table)
        if found is None:
            return
        series = self._series(table)
        for row in [row for row in self._running if row[0] == series and row[1] not in found]:
            del self._running[row]
        for key, (site, numbers) in found.items():
            row = (series, key)
            if row not in self._running:
                alone = site.without_parts()
                self._running[row] = Repeated(key=key, site=alone, numbers=numbers, first=step)
            self._running[row].num_steps += 1
            if self._running[row].num_steps >= self.limit("least_steps"):
                self._kept.setdefault(row, self._running[row])

    def end(self) -> Iterator[Finding]:
        """Faults that lasted for at least `least_steps` steps."""
        for row in self._kept.values():
            yield self.finding(row.site, self._message(row), step=row.first, **row.numbers, num_steps=row.num_steps)

    @abstractmethod
    def _wrong(self, table: StepTable) -> Found | None:
        """Faults of a step; None if the step tells nothing, and is not counted."""

    @abstractmethod
    def _message(self, row: Repeated) -> str:
        """Sentences about a fault that lasted for several steps."""

    def _series(self, table: StepTable) -> str:  # noqa: ARG002
        """Name of the series to which a step belongs; each series is counted by itself."""
        return ""
