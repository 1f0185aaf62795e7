"""Reports of a run of a recipe that failed, and of what torch's compiler logged."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

from traindiff.analyse.compare.verification import CompilerLog, FailedRank, FailedRun
from traindiff.errors import ConfigError, Problem
from traindiff.run.processes.rank_end import RanksError

_LINE = re.compile(r"\[__(guards|recompiles|graph_breaks)\] ?(.*)$")
_BREAK = "Graph break in user code at "
_REASON = "Graph Break Reason: "
_AGAIN = "Recompiling function "
_GUARD = re.compile(r"^[| ]*\+- (?!GuardManager|RootGuardManager)\w+:")
_FAILED_GUARD = re.compile(r"^ +- \d+/\d+: (.*)$")


def compiler_log(outputs: Path) -> CompilerLog:
    """The compiler's log of all ranks, read from their output in `outputs` and gathered there in `compiler.txt`."""
    breaks: list[str] = []
    again: list[str] = []
    num_guards = 0
    gathered: list[str] = []
    for path in sorted(outputs.glob("rank-*.txt")):
        for line in path.read_text(errors="replace").splitlines():
            if not (match := _LINE.search(line)):
                continue
            kind, said = match.groups()
            gathered.append(f"{path.stem}: {line}")
            if kind == "guards":
                num_guards += bool(_GUARD.match(said))
            elif kind == "graph_breaks":
                _told(breaks, said, begins=_BREAK, reason=said.removeprefix(_REASON) if _REASON in said else "")
            else:
                found = _FAILED_GUARD.match(said)
                _told(again, said, begins=_AGAIN, reason=found[1].partition("  #")[0].strip() if found else "")
    file = outputs / "compiler.txt"
    outputs.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{line}\n" for line in gathered))
    return CompilerLog(graph_breaks=tuple(breaks), recompiles=tuple(again), num_guards=num_guards, file=str(file))


def _told(entries: list[str], said: str, *, begins: str, reason: str) -> None:
    """Start an entry with its place, or append the reason, which is logged on a line of its own."""
    if said.startswith(begins):
        entries.append(said.removeprefix(begins))
    elif reason and entries:
        entries[-1] += f": {reason}"


_FIX = "Make this run end by itself, without traindiff, first."


class RunFailedError(Exception):
    """Raised if a run of a recipe fails. The caller knows the purpose of the run, and turns this into a user's error.

    Attributes:
        run: How it failed.
        error: The error of a run in this process, with its traceback.
    """

    def __init__(self, run: FailedRun, error: ConfigError | None = None) -> None:
        self.run = run
        self.error = error
        super().__init__(run.message)


def of_ranks(name: str, error: RanksError) -> FailedRun:
    """The failure of ranks that were launched."""
    ranks = tuple(
        FailedRank(
            rank=end.rank, how=end.how, message=end.sentence, num_steps=end.num_steps, stack=end.stack,
            last_observation=end.last_observation, output=end.output, output_file=end.output_file,
        )
        for end in error.ends
    )  # fmt: skip
    return FailedRun(run=name, first=error.first.rank, ranks=ranks)


def of_this_process(name: str, error: ConfigError, *, num_steps: int, last_observation: str) -> FailedRun:
    """The failure of a run in this process; `error` explains an exception of the user's code."""
    cause = error.__cause__ or error
    rank = FailedRank(
        rank=0, how="raised", message=f"Rank 0 raised {type(cause).__name__}: {cause}", num_steps=num_steps,
        stack="".join(traceback.format_exception(cause)), last_observation=last_observation,
    )  # fmt: skip
    return FailedRun(run=name, first=0, ranks=(rank,))


def refused(failed: RunFailedError, asked_by: str) -> ConfigError:
    """The error for a failed run without which nothing can be concluded."""
    if failed.error is not None:
        return failed.error
    run = failed.run
    more = tuple(line for text in list(run.lines())[1:] for line in text.splitlines())
    what = f"failed. {run.message}"
    return ConfigError(asked_by, [Problem(where=f"run {run.run}", what=what, fix=_FIX, more=more)])
