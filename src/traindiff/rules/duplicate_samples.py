"""Samples that a batch has more than once, on one rank or on several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.findings.sentences import ranks_text
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.batches import WholeSample, elements_of_a_sample, inputs_of, whole_samples
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule


class SamplesDiffer(Rule):
    """Batches most of whose samples are there more than once, in all inputs of the model.

    Where data-parallel ranks have the same samples, a sampler does not divide them. Draws with replacement, and data
    with few different samples, have some twice, so it is a warning, asked of the larger part of a batch of 8 and more.
    """

    name = "duplicate-samples"
    finds = "Most samples of a batch are there more than once, or several ranks have the same ones."
    kinds = ("duplicate-samples",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "share": Limit(default=0.5, says="largest share of a batch's samples that may be copies of an earlier one"),
        "least_samples": Limit(default=8, says="samples that a batch must have; of few, some may be alike"),
        "least_elements": Limit(default=8, says="numbers that a sample must have; short ones are often alike"),
        "least_steps": Limit(default=3, says="steps in a row in which it must be so"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_a_row: InARow[str, tuple[Entry, int, int, tuple[int, ...]]] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        samples, inputs = whole_samples(table), inputs_of(table)
        if not inputs or len(samples) < self.limit("least_samples"):
            return ()
        if elements_of_a_sample(table) < self.limit("least_elements"):
            return ()
        if not _same_in_all_micro_steps(samples):  # another rule's
            copies = len(samples) - len({one.fingerprints for one in samples})
            alike = _ranks_alike(samples)
            found = {}
            if copies > self.limit("share") * len(samples) or alike:
                found[""] = (inputs[0].without_parts(), copies, len(samples), alike)
            self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for _, (entry, copies, samples, alike), first, num_steps in self._in_a_row:
            if alike:
                says = (
                    f"{ranks_text(alike)} have the same samples, in {num_steps} steps in a row: the work of all but "
                    "one of them is lost. Give the loader a DistributedSampler, or a seed of each rank's own."
                )
            else:
                says = (
                    f"{copies} of the {samples} samples of a batch are copies of others, in {num_steps} steps in a "
                    "row. Look at the sampler, and at what collates the batch."
                )
            evidence = {"copies": copies, "samples": samples, "ranks": list(alike), "num_steps": num_steps}
            yield finding_at(entry, step=first, kind="duplicate-samples", says=says, evidence=evidence)


def _ranks_alike(samples: Sequence[WholeSample]) -> tuple[int, ...]:
    """Ranks that have the same samples as another one."""
    by_rank: dict[int, list[tuple[int, ...]]] = {}
    for one in samples:
        by_rank.setdefault(one.rank, []).append(one.fingerprints)
    sets = {rank: tuple(sorted(found)) for rank, found in by_rank.items()}
    times = Counter(sets.values())
    return tuple(rank for rank, found in sets.items() if times[found] > 1)


def _same_in_all_micro_steps(samples: Sequence[WholeSample]) -> bool:
    found: dict[int, set[tuple[int, ...]]] = {}
    for one in samples:
        found.setdefault(one.micro_step, set()).add(one.fingerprints)
    return len(found) > 1 and len({frozenset(one) for one in found.values()}) == 1
