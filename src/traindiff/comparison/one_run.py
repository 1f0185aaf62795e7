"""What is wrong with one run by itself, and what of that tells two runs apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from traindiff.comparison.agreement import KIND as DISAGREEMENT
from traindiff.comparison.agreement import agreement_findings
from traindiff.comparison.alignment import Rename
from traindiff.comparison.boundaries import KIND as BOUNDARY
from traindiff.comparison.boundaries import boundary_findings
from traindiff.comparison.consistency import RunFacts, consistency_findings
from traindiff.comparison.replay import not_replayed, replay_findings
from traindiff.comparison.step_table import Entry, Key
from traindiff.comparison.verdict import Finding
from traindiff.recording import Recording

LENIENT = 2.0
"""What one run has clearly, the other has if it shows half as clearly: then it does not tell them apart."""

COINCIDENCES = frozenset({"reported-norm"})
"""Kinds that rest on two numbers being equal: by chance they may be, once."""

OF_RANKS = frozenset({DISAGREEMENT, BOUNDARY})
"""Kinds that begin with what is wrong on which rank."""

RUNS = ("baseline", "candidate")


def run_facts(recording: Recording, rename: Rename = str) -> RunFacts:
    """What does not change during a run."""
    contents = [recording.rank_content(rank) for rank in recording.ranks]
    everything = recording.run["settings"].get("select", ["*"]) == ["*"] and not recording.missing_ranks
    one_optimizer = all(len(content.get("optimizers", ())) == 1 for content in contents)
    return RunFacts(
        complete=everything and one_optimizer and bool(contents),
        modules={rename(path): name for one in contents for path, name in one.get("modules", {}).items()},
        tied={rename(other): rename(path) for one in contents for other, path in one.get("tied", {}).items()},
    )


@dataclass(slots=True)
class OneRun:
    """Judges a run by itself, step by step.

    Args:
        facts: What does not change during the run.
    """

    facts: RunFacts
    _seen: dict[tuple[str, str], int] = field(default_factory=dict)

    def findings(self, table: Mapping[Key, Entry], *, step: int, strictness: float = 1.0) -> list[Finding]:
        """What is wrong in a step. What may be a coincidence is told the second time that it is seen in a row."""
        found = [*agreement_findings(table, step=step), *boundary_findings(table, step=step)]
        found += [*replay_findings(table, step=step, strictness=strictness)]
        suspected = consistency_findings(table, self.facts, step=step, strictness=strictness)
        seen = {(one.kind, str(one.evidence.get("what", ""))): one for one in suspected}
        self._seen = {what: self._seen.get(what, 0) + 1 for what in seen}
        found += [one for what, one in seen.items() if one.kind not in COINCIDENCES or self._seen[what] >= 2]
        return sorted(found, key=lambda finding: finding.order)


class BothRuns:
    """Judges each of two runs by itself.

    Attributes:
        shared: What is wrong in both runs, so that it does not tell them apart: one sentence per kind.
        unknown: Optimizers that were not replayed, in sentences, by run.
    """

    def __init__(self, facts: Sequence[RunFacts]) -> None:
        self._strict = [OneRun(one) for one in facts]
        self._lenient = [OneRun(one) for one in facts]
        self.shared: dict[str, str] = {}
        self.unknown: dict[str, str] = {}

    def findings(self, tables: Sequence[Mapping[Key, Entry]], *, step: int) -> list[Finding]:
        """What is wrong with one run of the two and not with the other, labelled with which it is."""
        for name, table in zip(RUNS, tables, strict=True):
            for reason in not_replayed(table):
                self.unknown.setdefault(
                    name, f"{name}: an optimizer is {reason}, so it is judged by the other run only."
                )
        strict = [run.findings(table, step=step) for run, table in zip(self._strict, tables, strict=True)]
        lenient = [
            {_what(one) for one in run.findings(table, step=step, strictness=LENIENT)}
            for run, table in zip(self._lenient, tables, strict=True)
        ]
        found = []
        for name, own, other in zip(RUNS, strict, lenient[::-1], strict=True):
            for one in own:
                if one.kind == "lost-update" and one.path in {path for _, path in other - {_what(one)}}:
                    continue  # worse than lost there, and said of that run
                if _what(one) in other:
                    self.shared.setdefault(one.kind, f"In both runs: {one.says}")
                else:
                    evidence = {**one.evidence, "run": name}
                    says = one.says[:1].lower() + one.says[1:] if one.kind in OF_RANKS else one.says
                    found.append(replace(one, says=f"In the {name}, {says}", evidence=evidence))
        return found


def _what(finding: Finding) -> tuple[str, str]:
    return finding.kind, finding.path
