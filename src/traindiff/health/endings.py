"""How the ranks of a run ended, and whether steps are missing because of that."""

from __future__ import annotations

from traindiff.findings.sentences import phase_text
from traindiff.merging.run_steps import RunStep
from traindiff.observation import Observation
from traindiff.recording import Run
from traindiff.site import label
from traindiff.steps import ALL_STEPS, StepSelection, parse_steps


class Endings:
    """Follows each rank to its last step.

    Args:
        run: The run.
        selection: Steps that are wanted of it.
    """

    def __init__(self, run: Run, selection: StepSelection) -> None:
        self._run = run
        self._selection = selection
        self._last: dict[int, Observation] = {}
        self._finished: dict[int, dict[str, int]] = {}  # the last finished step, by rank and optimizer

    def see(self, step: RunStep) -> None:
        """Take note of a step, wanted or not."""
        self._last.update(step.last)
        if step.finished:
            for rank in step.last:
                self._finished.setdefault(rank, {})[step.optimizer] = step.step

    def sentences(self) -> tuple[list[str], list[str]]:
        """About ranks that were killed or aborted: those that lack steps that are wanted, and those that do not."""
        lacking: list[str] = []
        whole: list[str] = []
        for rank in self._run.ranks:
            status = self._run.status(rank)
            if status.ending != "closed":
                (lacking if self._lacks_steps(rank) else whole).append(f"{status.says} {self._came_to(rank)}")
        return lacking, whole

    def _lacks_steps(self, rank: int) -> bool:
        """Whether the rank would have recorded a further step that is wanted, had it come so far."""
        settings = self._run.run["settings"]
        recorded = parse_steps(settings.get("steps"), where="run.json")
        last = min(self._finished.get(rank, {}).values(), default=-1)
        return self._selection.has_after(
            last,
            within=recorded if isinstance(recorded, StepSelection) else ALL_STEPS,
            every=settings.get("every", 1),
        )

    def _came_to(self, rank: int) -> str:
        """The last step and the last observation of a rank."""
        seen = self._last.get(rank)
        if seen is None:
            return "It has observed nothing."
        finished = max(self._finished.get(rank, {}).values(), default=None)
        steps = "It has finished no step" if finished is None else f"Its last finished step is {finished}"
        micro = f", micro-step {seen.micro_step}" if seen.micro_step else ""
        where = f"{phase_text(seen.phase, seen.stage)} {label(seen.path, seen.slot)} in step {seen.step}{micro}"
        return f"{steps}; its last observation is {where}."
