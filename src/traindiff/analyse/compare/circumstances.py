"""Differences between the circumstances of two runs: no finding, but worth knowing when there is one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from traindiff.analyse.align.pairs import Aligned
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair
from traindiff.storage.manifest import framework

_OWN_STATISTICS = re.compile(r"BatchNorm[123]d|LazyBatchNorm[123]d")
_RANDOM = re.compile(r"(Alpha|FeatureAlpha)?Dropout([123]d)?|RReLU")


def with_each_ranks_own(finding: Finding, modules: Mapping[str, str], sizes: tuple[int, int]) -> Finding:
    """The finding, which says so if its module takes what it computes from each rank's own samples.

    Args:
        finding: The first one.
        modules: Class name of each module by path, in the run that divides the batch over more ranks.
        sizes: Over how many ranks the batch is divided in each run.
    """
    if sizes[0] == sizes[1] or finding.phase != "forward":
        return finding
    name = modules.get(finding.path, "")
    if _OWN_STATISTICS.fullmatch(name):
        message = (
            f" {name} takes the statistics of each rank's own samples; SyncBatchNorm takes those of the whole batch."
        )
    elif _RANDOM.fullmatch(name):
        message = f" {name} draws other numbers where the batch is divided over ranks: compare with it turned off."
    else:
        return finding
    return replace(finding, message=finding.message + message)


_STATISTICS = re.compile(r"(Lazy)?BatchNorm[123]d|SyncBatchNorm")
_COUNTER = "num_batches_tracked"


def of_batch_statistics(
    finding: Finding, modules: Mapping[str, str], aligned: Aligned, micro_steps: tuple[int, int]
) -> str:
    """Why a BatchNorm's output differs, in a sentence that follows the finding's; empty for anything else.

    Args:
        finding: The first one.
        modules: Class name of each module by path.
        aligned: The sites of its step. In evaluation mode BatchNorm does not count its batches, and its counter is
            recorded in steps that change it.
        micro_steps: Into how many micro-batches each run divides the step's batch.
    """
    name = modules.get(finding.path, "")
    if finding.phase != "forward" or not _STATISTICS.fullmatch(name):
        return ""
    for run, entries in (("candidate", aligned.only_baseline), ("baseline", aligned.only_candidate)):
        if any(entry.key.path == f"{finding.path}.{_COUNTER}" for entry in entries):
            return f" The {run}'s {name} does not take note of this batch, the other run's does: is it in eval mode?"
    if micro_steps[0] != micro_steps[1]:
        return (
            f" {name} takes the statistics of each micro-batch, and the step has {micro_steps[0]} in the baseline and "
            f"{micro_steps[1]} in the candidate: such runs differ rightly."
        )
    return ""


def of_unseen_targets(finding: Finding, pairs: Iterable[Pair]) -> str:
    """That the loss may differ by its labels, in a sentence that follows the finding's; empty for anything else.

    Args:
        finding: The first one.
        pairs: Of its step. Where the training hands over tensors of its own (`traindiff.inspect`), it knows how.
    """
    looks_like_labels = finding.kind in ("value", "scale", "offset") and "(=" not in finding.message
    if (finding.phase, finding.slot) != ("loss", "backward") or not looks_like_labels:
        return ""
    if any(pair.baseline.key.phase == "forward" and pair.baseline.key.slot == "value" for pair in pairs):
        return ""
    return (
        " Labels that only the loss receives are not recorded: if they may differ, "
        'traindiff.inspect("labels", labels) records them.'
    )


def scale_factors(baseline: float, candidate: float) -> list[tuple[float, str]]:
    """Factors that a wrong treatment of the loss scales would leave, and what to say of them."""
    found = []
    for name, scale in (("candidate", candidate), ("baseline", baseline)):
        if scale != 1.0:
            more, less = (scale, 1.0 / scale) if name == "candidate" else (1.0 / scale, scale)
            found.append((more, f"= the {name}'s loss scale {scale:g}: never divided out?"))
            found.append(
                (less, f"= 1/{scale:g}, one over the {name}'s loss scale: divided out without being applied, or twice?")
            )
    return found


def scale_note(baseline: float, candidate: float) -> str:
    """What to say of two runs with other loss scales; empty where they are the same."""
    if baseline == candidate:
        return ""
    scales = [f"{scale:g}" if scale != 1.0 else "none" for scale in (baseline, candidate)]
    return f"Loss scales differ ({scales[0]} in the baseline, {scales[1]} in the candidate); they are divided out."


_WATCHED = (
    ("versions", "torch"),
    ("versions", "mindspore"),
    ("versions", "triton"),
    ("environment", "machine"),
    ("environment", "devices"),
    ("environment", "num_threads"),
    ("environment", "default_dtype"),
    ("environment", "float32_matmul_precision"),
    ("environment", "deterministic_algorithms"),
)

_OF_ANY_FRAMEWORK = (("environment", "machine"),)
"""What means the same in another framework."""


def circumstances(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """One sentence that lists what differs between two `run.json`, or nothing."""
    runs = (baseline, candidate)
    frameworks = framework(baseline), framework(candidate)
    differ = frameworks[0][0] != frameworks[1][0] and all(run.get("environment") for run in runs)
    changes = [" and ".join(map(" ".join, frameworks))] if differ else []
    for section, name in _OF_ANY_FRAMEWORK if differ else _WATCHED:
        sections = [run.get(section, {}) for run in runs]
        before, after = (one.get(name) for one in sections)
        if before != after and all(sections):  # of a run that was imported, nothing is known
            changes.append(f"{name.replace('_', ' ')} {_show(before)} and {_show(after)}")
    if baseline.get("world_size") != candidate.get("world_size"):
        changes.append(f"world size {baseline.get('world_size')} and {candidate.get('world_size')}")
    return [f"Circumstances differ (baseline and candidate): {'; '.join(changes)}."] if changes else []


def other_dtypes(sites: Mapping[tuple[str, str], Set[object]]) -> list[str]:
    """One sentence per pair of dtypes, where the two runs compute in different ones.

    Args:
        sites: Sites by dtype in the baseline and in the candidate.
    """
    return [
        f"{len(found)} {'site is' if len(found) == 1 else 'sites are'} {baseline} in the baseline and {candidate} in "
        "the candidate; floors follow the shorter of the two."
        for (baseline, candidate), found in sites.items()
    ]


def not_forced(candidate: Sequence[Mapping[str, Any]]) -> list[str]:
    """One sentence where tensors of a forced run kept their own values.

    Args:
        candidate: What the ranks of the run hold (`rank.json`).
    """
    own = {site: why for content in candidate for site, why in content.get("not_forced", {}).items()}
    if not own:
        return []
    site, why = next(iter(own.items()))
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return [f"Not forced, so what is computed from it may carry earlier errors: {site} ({why}){more}."]


def other_models(models: tuple[str, str], paths: tuple[frozenset[str], frozenset[str]]) -> list[str]:
    """One sentence for recordings of models that have nothing in common, or nothing."""
    baseline, candidate = (one - {""} for one in paths)
    if not baseline or not candidate or baseline & candidate:
        return []
    return [
        f"The recordings are of different models, {' and '.join(models)}: no module or parameter has the same path in "
        "both. Give recordings of one model, or --rename PATTERN=REPLACEMENT."
    ]


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
