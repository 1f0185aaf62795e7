"""After a batch: what all ranks have seen goes to rank 0, is compared there, and all hear what came of it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from traindiff.comparison.running import ComparedStep
from traindiff.comparison.verdict import Comparison
from traindiff.errors import LockstepError, TraindiffError
from traindiff.lockstep.live_comparison import LiveComparison
from traindiff.lockstep.live_side import LiveSide
from traindiff.lockstep.message import RunMessage, decoded, encoded
from traindiff.lockstep.ranks import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a batch.

    Attributes:
        diverged: Whether anything was found.
        compared: The steps that were compared; on rank 0 alone.
        losses: The mean losses of baseline and candidate over ranks; None where nobody asked.
    """

    diverged: bool = False
    compared: tuple[ComparedStep, ...] = ()
    losses: tuple[float, float] | None = None


class Exchange:
    """Brings together what the ranks have seen.

    Args:
        ranks: The ranks.
        sides: Baseline, candidate, and copies of the baseline.
        comparison: Compares, on rank 0.
    """

    def __init__(self, ranks: Ranks, sides: Sequence[LiveSide], comparison: LiveComparison) -> None:
        self._ranks = ranks
        self._sides = sides
        self._comparison = comparison
        self._compare(self._sent([side.message() for side in sides]))  # what each rank holds, before any step

    def after_batch(self, *, wants_losses: bool) -> Outcome:
        """Compare the steps that the batch has ended, if it has ended any.

        Args:
            wants_losses: Whether the losses are asked for; then they are read from their device.

        Raises:
            LockstepError: Ranks, or sides, have ended different steps.
            TraindiffError: They cannot be compared.
        """
        own = sum(side.num_waiting for side in self._sides)
        asked = wants_losses or own > 0
        losses = [side.loss_number for side in self._sides[:2]] if asked else [0.0, 0.0]
        waiting, *rest = zip(*self._ranks.meet([own, *losses]), strict=True)
        means = (_mean(rest[0]), _mean(rest[1])) if asked else None
        if len(set(waiting)) > 1:
            odd = next(rank for rank, number in enumerate(waiting) if number != waiting[0])
            raise LockstepError(
                f"Rank {odd} has ended {waiting[odd]:g} steps in this batch, all runs together, and rank 0 has ended "
                f"{waiting[0]:g}: optimizers must step on all ranks in the same batches."
            )
        if not own:
            return Outcome(losses=means)
        diverged, compared = self._compare(self._sent([side.message() for side in self._sides]))
        return Outcome(diverged=diverged, compared=compared, losses=means)

    def losses(self) -> tuple[float, float]:
        """The mean losses of the latest batch over ranks, baseline's first."""
        baseline, candidate = zip(*self._ranks.meet([side.loss_number for side in self._sides[:2]]), strict=True)
        return _mean(baseline), _mean(candidate)

    def begin_again(self) -> None:
        """The candidate was set back to the baseline's state."""
        self._comparison.begin_again()

    def result(self) -> Comparison:
        """The comparison of all steps so far, on every rank."""
        made = pickle.dumps(self._comparison.result()) if self._ranks.rank == 0 else None
        found: Comparison = pickle.loads(self._ranks.share(made))
        return found

    def _sent(self, message: list[RunMessage]) -> list[list[RunMessage]] | None:
        """The messages of all ranks on rank 0, None on the others."""
        if self._ranks.size == 1:
            return [message]
        content = encoded(message)
        sizes = [int(size) for (size,) in self._ranks.meet([len(content)])]
        found = self._ranks.gather(content, sizes)
        return None if found is None else [decoded(one, rank) for rank, one in enumerate(found)]

    def _compare(self, messages: list[list[RunMessage]] | None) -> tuple[bool, tuple[ComparedStep, ...]]:
        compared: tuple[ComparedStep, ...] = ()
        error: TraindiffError | None = None
        if messages is not None:
            try:
                compared = tuple(self._comparison.hear(messages))
            except TraindiffError as found:
                error = found
        says = {"diverged": any(one.findings for one in compared), "error": str(error) if error else ""}
        told = json.loads(self._ranks.share(json.dumps(says).encode() if self._ranks.rank == 0 else None))
        if error is not None:
            raise error
        if told["error"]:
            raise LockstepError(told["error"])
        return bool(told["diverged"]), compared


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)
