"""What torch's compiler said of a run, gathered from what its ranks printed."""

from __future__ import annotations

import re
from pathlib import Path

from traindiff.comparison.compiler_log import CompilerLog

_LINE = re.compile(r"\[__(guards|recompiles|graph_breaks)\] ?(.*)$")
_BREAK = "Graph break in user code at "
_REASON = "Graph Break Reason: "
_AGAIN = "Recompiling function "
_GUARD = re.compile(r"^[| ]*\+- (?!GuardManager|RootGuardManager)\w+:")
_FAILED_GUARD = re.compile(r"^ +- \d+/\d+: (.*)$")


def compiler_log(outputs: Path) -> CompilerLog:
    """Gather what the compiler said, of all ranks, into `compiler.txt` beside what they printed.

    Args:
        outputs: Directory of what ranks printed.
    """
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
    """An entry begins with where it was; its reason comes in a line of its own."""
    if said.startswith(begins):
        entries.append(said.removeprefix(begins))
    elif reason and entries:
        entries[-1] += f": {reason}"
