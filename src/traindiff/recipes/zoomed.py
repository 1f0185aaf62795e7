"""Zoom in: run a step that was pinned down once more, and record the operators of the module that is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from traindiff.comparison import Pinned
from traindiff.errors import ConfigError
from traindiff.findings import Finding
from traindiff.merging.renames import parse_renames
from traindiff.recipes.failed import RunFailedError
from traindiff.recipes.pinning import ForcedSteps, pin_down, precision_named, why_not_forced
from traindiff.recipes.runs import Runs
from traindiff.recording import open_recording

if TYPE_CHECKING:
    from traindiff.recipes.questioned import Question

EVERYWHERE = "*"


def zoom_in(pinned: Sequence[Pinned], question: Question, runs: Runs, forced: ForcedSteps) -> tuple[Pinned | None, str]:
    """The first of the steps that were pinned down in which something is wrong, with its operators.

    Args:
        pinned: The step in each precision.
        question: What is asked of the candidate.
        runs: Where, and how.
        forced: Steps that the candidate can be forced to.

    Returns:
        The step; where it cannot be had, None and the reason.
    """
    wrong = next((one for one in pinned if _zoomable(one)), None)
    if wrong is None:
        return None, "No operators were recorded: given the baseline's tensors, no module is wrong alone."
    if forced.setup.nproc != question.setup.nproc:
        return None, (
            f"No operators were recorded: the baseline has {forced.setup.nproc} and the candidate "
            f"{question.setup.nproc} ranks, and operators are compared rank by rank."
        )
    if why := why_not_forced(question.setup):
        return None, f"No operators were recorded: {why}"
    found: Pinned | None = None
    for patterns in _modules(_zoomable(wrong)[0], wrong, question.rename):
        try:
            given = forced.step(wrong.step, precision_named(wrong.precision), operators=patterns[0])
            found = pin_down(
                runs, given, question.candidate, setup=question.setup, rename=question.rename, operators=patterns[1]
            )
        except ConfigError as error:
            problem = error.problems[0]
            return found, f"No operators could be recorded: {problem.where} {problem.what} {problem.fix}"
        except RunFailedError as error:
            return found, f"No operators could be recorded: the run {error.run.run} failed. {error.run.says}"
        if any(zoom.cause in ("operator", "other-operators") for zoom in found.comparison.zooms):
            break
    return found, ""


def _zoomable(pinned: Pinned) -> list[Finding]:
    found = [one for one in pinned.comparison.findings if one.phase in ("forward", "backward", "grad")]
    return [one for one in found if one.kind not in ("missing", "extra")]


def _modules(
    finding: Finding, pinned: Pinned, rename: Mapping[str, str] | Sequence[str] | None
) -> list[tuple[str, str]]:
    """What baseline and candidate call the modules that may have made the difference, as patterns; likelier ones first.

    What a module returns depends on the code of the modules around it, from the last site before it that agrees. The
    gradient that comes back to an output was made by whatever took that output, which may be anywhere.
    """
    everywhere = (EVERYWHERE, EVERYWHERE)
    if finding.phase == "backward":
        return [everywhere]
    path = finding.path
    if finding.phase == "grad":
        path = path.rpartition(".")[0]
    elif after := str(finding.evidence.get("after") or ""):
        path = _common(path, after.rpartition(" ")[0])
    renamed = parse_renames(rename)
    modules = (_paths(pinned.comparison.baseline), _paths(pinned.comparison.candidate))
    other = next((one for one in modules[1] if renamed(one) == path), None)
    if not path or path not in modules[0] or other is None:
        return [everywhere]
    return [(path, other), everywhere]


def _common(path: str, other: str) -> str:
    """The innermost module that holds both, or is one of them; empty for the root."""
    common = []
    for one, two in zip(path.split("."), other.split("."), strict=False):
        if one != two:
            break
        common.append(one)
    return ".".join(common)


def _paths(recording: str) -> list[str]:
    opened = open_recording(recording)
    return [path for rank in opened.ranks for path in opened.rank_content(rank).get("modules", {})]
