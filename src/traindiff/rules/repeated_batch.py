"""The same batch, step after step, or micro-step after micro-step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.batches import inputs_of, whole_samples
from traindiff.rules.in_a_row import InARow
from traindiff.rules.rule import Limit, Rule


class BatchesChange(Rule):
    """Batches with the same elements as the step before, and micro-batches with the same samples.

    All inputs of the model are compared, by fingerprints that do not depend on the order. Optimizers that compute the
    loss themselves (LBFGS) may do so several times on one batch, and their micro-steps are not compared. Training on
    one batch is how a model is tried, and data may be a single batch, so it is a warning.
    """

    name = "repeated-batch"
    finds = "Step after step has the same batch, or its micro-steps have."
    kinds = ("repeated-batch",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=3, says="steps in a row that repeat the one before, or their own micro-batches"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._before: tuple[tuple[str, int], ...] = ()
        self._in_a_row: InARow[str, Entry] = InARow(self.limit("least_steps"))

    def step(self, table: Mapping[Key, Entry], *, step: int) -> tuple[Finding, ...]:
        """Takes note of the step."""
        inputs = inputs_of(table)
        if not inputs:
            return ()
        now = tuple((entry.key.slot, int(entry.summary["multiset"])) for entry in inputs)
        found = {}
        if now == self._before:
            found["the step before"] = inputs[0].without_parts()
        if _same_in_micro_steps(table) and not _has_closure(table, inputs[0]):
            found["micro-steps"] = inputs[0].without_parts()
        self._before = now
        self._in_a_row.see(found, step=step)
        return ()

    def end(self) -> Iterator[Finding]:
        """See the class."""
        for what, entry, first, num_steps in self._in_a_row:
            says = (
                f"{num_steps} steps in a row have the same batch as the step before. If it is not meant, look at the "
                "sampler, and at whether the loader is made anew in each step."
                if what == "the step before"
                else f"All micro-steps of a step have the same samples, in {num_steps} steps: gradients are "
                "accumulated over one micro-batch. Is the next one taken inside the loop over micro-steps?"
            )
            yield finding_at(entry, step=first, kind="repeated-batch", says=says, evidence={"num_steps": num_steps})


def _same_in_micro_steps(table: Mapping[Key, Entry]) -> bool:
    """Whether every micro-step of a rank works on the same samples."""
    found: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for one in whole_samples(table):
        found.setdefault((one.rank, one.micro_step), []).append(one.fingerprints)
    by_rank: dict[int, set[tuple[tuple[int, ...], ...]]] = {}
    for (rank, _), samples in found.items():
        by_rank.setdefault(rank, set()).add(tuple(sorted(samples)))
    num_micro_steps = len({micro_step for _, micro_step in found})
    return num_micro_steps > 1 and all(len(samples) == 1 for samples in by_rank.values())


def _has_closure(table: Mapping[Key, Entry], first_input: Entry) -> bool:
    """Whether the optimizer computes the loss itself: it was called before the first forward pass."""
    return any(key.group and entry.order < first_input.order for key, entry in table.items())
