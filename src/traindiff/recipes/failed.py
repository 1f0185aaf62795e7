"""What is known of a run of a recipe that failed."""

from __future__ import annotations

import traceback

from traindiff.comparison.failed_run import FailedRank, FailedRun
from traindiff.errors import ConfigError, Problem
from traindiff.launching.rank_end import RanksError

_FIX = "Make this run end by itself, without traindiff, first."


class RunFailedError(Exception):
    """A run of a recipe did not come to its end. Raised here, and told to the user by whoever knows what the run was.

    Args:
        run: What happened.
        error: What says so of a run in this process.

    Attributes:
        run: What happened.
        error: What says so of a run in this process; its traceback comes along.
    """

    def __init__(self, run: FailedRun, error: ConfigError | None = None) -> None:
        self.run = run
        self.error = error
        super().__init__(run.says)


def of_ranks(name: str, error: RanksError) -> FailedRun:
    """What happened on ranks that were launched."""
    ranks = tuple(
        FailedRank(
            rank=end.rank, how=end.how, says=end.sentence, num_steps=end.num_steps, stack=end.stack,
            last_observation=end.last_observation, output=end.output, output_file=end.output_file,
        )
        for end in error.ends
    )  # fmt: skip
    return FailedRun(run=name, first=error.first.rank, ranks=ranks)


def of_this_process(name: str, error: ConfigError, *, num_steps: int, last_observation: str) -> FailedRun:
    """What happened in this process: `error` tells of an exception of the user's code."""
    cause = error.__cause__ or error
    rank = FailedRank(
        rank=0, how="raised", says=f"Rank 0 raised {type(cause).__name__}: {cause}", num_steps=num_steps,
        stack="".join(traceback.format_exception(cause)), last_observation=last_observation,
    )  # fmt: skip
    return FailedRun(run=name, first=0, ranks=(rank,))


def refused(failed: RunFailedError, asked_by: str) -> ConfigError:
    """The error for a run without which nothing can be said."""
    if failed.error is not None:
        return failed.error
    run = failed.run
    fix = "\n    ".join((_FIX, *list(run.lines())[1:]))
    return ConfigError(asked_by, [Problem(where=f"run {run.run}", what=f"failed. {run.says}", fix=fix)])
