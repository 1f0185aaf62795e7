"""Two recordings that are opened to be compared: which of their steps belong together, and the pairs of these."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

from traindiff.analyse.align.continuation import Continuation, begin_alike, find_continuation, other_offsets
from traindiff.analyse.align.optimizer_names import with_names_of
from traindiff.analyse.align.two_runs import TwoRuns
from traindiff.analyse.blocks.steps import pairs_of
from traindiff.analyse.blocks.tasks import Tasks
from traindiff.analyse.findings import Finding, listed_text
from traindiff.analyse.merge.parameters import parameter_groups, trained_parameters
from traindiff.analyse.merge.renames import Rename, Renaming
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.span import WHOLE_RUN, span_of
from traindiff.core.maps.entries import Entry
from traindiff.core.steps import StepSelection
from traindiff.storage import Recording, ShiftedRecording


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Two recordings whose steps belong together by their numbers.

    Attributes:
        recordings: Baseline and candidate, with the numbers and names by which they are compared.
        runs: Brings their steps together.
        pairs: Their steps, those of the baseline first; None for a run that does not have the step.
        continuation: The step of the baseline at which the candidate begins, if it was looked for and found.
        begins_nowhere: It was looked for, and not found.
    """

    recordings: tuple[Recording, Recording]
    runs: TwoRuns
    pairs: Iterator[tuple[RunStep | None, RunStep | None]]
    continuation: Continuation | None = None
    begins_nowhere: bool = False

    @property
    def lost(self) -> tuple[str, ...]:
        """Parameters with which the candidate begins otherwise.

        With several optimizers, there may be no step that finds all parameters as they were at the beginning.
        """
        if self.continuation is None or len(self.runs.sides[0].groups) < 2:
            return ()
        return self.continuation.apart

    @staticmethod
    def _lost_note(paths: Sequence[str]) -> str:
        return (
            f"There, {listed_text(paths, 'parameter')} hold other values in one run than in the other: did the run "
            "that goes on load them?"
        )

    def notes(self, findings: Iterable[Finding]) -> list[str]:
        """A sentence about where the candidate begins, if what was found shows that it matters."""
        if self.continuation is not None:
            return [self.continuation.note, *([self._lost_note(self.lost)] if self.lost else [])]
        runs = [one.run for one in self.recordings]
        is_said = any(run.get("first_step") for run in runs)
        if not self.begins_nowhere or is_said or any(int(run["settings"].get("every", 1)) == 1 for run in runs):
            return []
        others = {one.path for one in findings if one.kind == "initial-parameter"}
        if 2 * len(others) <= len(self.recordings[0].rank_content(self.recordings[0].ranks[0]).get("parameters", ())):
            return []
        return [
            "The candidate begins with the parameters of no recorded step of the baseline. If it continues that "
            "training, record it with first_step=N: neither run recorded every step, and N, the number of steps "
            "before it, tells which of them belong together."
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToCompare:
    """Two recordings, and how they are compared.

    Attributes:
        baseline: The run that is trusted.
        candidate: The run in question.
        renames: Turns the candidate's paths into the baseline's, as the user says.
        named: The same, with what `entries` say.
        entries: What tensors and modules of the two runs are which.
        selection: Steps to compare.
        from_first: Whether all steps are read, and not only those that are compared.
        is_followed: Whether the candidate goes on.
    """

    baseline: Recording
    candidate: Recording
    renames: Renaming
    named: Rename
    entries: Sequence[Entry]
    selection: StepSelection
    from_first: bool
    is_followed: bool

    def opened(self, tasks: Tasks | None, offset: int | None) -> Opened:
        """The runs, opened.

        Args:
            tasks: Read and merge the steps; this process alone, if None.
            offset: What is added to the numbers of the candidate's steps; None if it is looked for.
        """
        opened = self._opened(tasks, offset or 0, {})
        if offset is not None or self.is_followed:
            return opened
        first = list(islice(opened.pairs, 1))
        trained = trained_parameters(self.candidate, parameter_groups(self.candidate, self.named), self.named)
        alike = bool(first) and begin_alike(*first[0], self.named, trained)
        found = None if alike else find_continuation(self.baseline, self.candidate, self.named)
        if found is None:
            return replace(opened, pairs=chain(first, opened.pairs), begins_nowhere=bool(first) and not alike)
        return replace(self._opened(tasks, found.step - found.own, found.others), continuation=found)

    def _opened(self, tasks: Tasks | None, shift: int, others: Mapping[str, int]) -> Opened:
        """The runs, with a number that is added to those of the candidate's steps, and others for some optimizers."""
        candidate = self.candidate
        if not self.is_followed:
            others = other_offsets(self.baseline, candidate, shift, others)
            candidate = ShiftedRecording(candidate.path, shift, others) if shift or others else candidate
            candidate = with_names_of(self.baseline, candidate, self.named)
        recordings = self.baseline, candidate
        runs = TwoRuns(recordings, self.renames, self.selection, self.entries)
        span = WHOLE_RUN if self.from_first else span_of(recordings, self.selection)
        pairs = pairs_of(recordings, span, copies=runs.copies, tasks=tasks)
        return Opened(recordings=recordings, runs=runs, pairs=pairs)
