"""`next` of the JSON results: the commands that would tell more about a result."""

from __future__ import annotations

import glob
import shlex
from collections.abc import Iterable, Sequence

from traindiff.analyse.findings import Finding
from traindiff.core.site import label

Commands = list[dict[str, str]]
"""Objects of `command`, as a shell takes it, and `why`: the question that it answers."""


def _command(*words: str, why: str) -> dict[str, str]:
    return {"command": shlex.join(("traindiff", *words)), "why": why}


def explaining(kinds: Iterable[str]) -> Commands:
    """The command that explains these kinds; none for no kind."""
    named = tuple(dict.fromkeys(kinds))
    return [_command("explain", *named, "--json", why="What does this kind of finding mean?")] if named else []


def _show(recording: str, finding: Finding, *, why: str) -> dict[str, str]:
    site = glob.escape(label(finding.path, finding.slot))
    where = ("--site", site, "--phase", finding.phase, "--steps", str(finding.step))
    return _command("show", recording, *where, "--json", why=why)


def of_comparison(
    baseline: str, candidate: str, *, findings: Sequence[Finding], word: str, calibrated: bool
) -> Commands:
    """What to ask after a comparison: about the first finding, or else about what limits the verdict."""
    if findings:
        first = findings[0]
        step = str(first.step)
        return [
            *explaining([first.kind]),
            _show(baseline, first, why="What are the baseline's numbers at the first finding?"),
            _show(candidate, first, why="What are the candidate's numbers there?"),
            _command(
                "compare", baseline, candidate, "--table", step, "--format", "csv",
                why="How do all sites of that step compare, in execution order?",
            ),
            _command("check", candidate, "--json", why="Does the candidate also break a rule by itself?"),
        ]  # fmt: skip
    if word == "incomplete":
        runs = ((baseline, "baseline"), (candidate, "candidate"))
        return [_command("check", path, "--json", why=f"Is the {role} complete?") for path, role in runs]
    if word == "equivalent" and not calibrated:
        return [_command("explain", "uncalibrated", "--json", why="How large are the floors of this verdict?")]
    return []


def of_check(recording: str, findings: Sequence[Finding]) -> Commands:
    """What to ask after a check: about the first finding, or the first warning if there is no finding."""
    if not findings:
        return []
    first = findings[0]
    return [
        *explaining(finding.kind for finding in findings),
        _show(recording, first, why="What are the numbers at the first one?"),
        _command("explain", "rules.md", why="Which rules are there, and what are their limits?"),
    ]
