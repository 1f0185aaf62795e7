"""Notes on differences between the settings and environments of two runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from traindiff.analyse.align.side import Side
from traindiff.analyse.findings import more_text, phase_text
from traindiff.analyse.merge.site import SiteKey
from traindiff.analyse.noise.run_floors import RECURRENT
from traindiff.analyse.rules import RunFacts
from traindiff.core.site import label
from traindiff.core.summary import UNIT_ROUNDOFF, rounding
from traindiff.core.tap_registry import TAPS
from traindiff.storage.manifest import framework


def circumstances(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> list[str]:
    """One sentence that lists the differences between two `run.json`, or nothing."""
    runs = (baseline, candidate)
    frameworks = framework(baseline), framework(candidate)
    differ = frameworks[0][0] != frameworks[1][0] and all(run.get("environment") for run in runs)
    changes = [" and ".join(map(" ".join, frameworks))] if differ else []
    for section, name in _OF_ANY_FRAMEWORK if differ else _WATCHED:
        sections = [run.get(section, {}) for run in runs]
        before, after = (one.get(name) for one in sections)
        if before != after and all(sections):  # an imported run has no such section
            changes.append(f"{name.replace('_', ' ')} {_show(before)} and {_show(after)}")
    if baseline.get("world_size") != candidate.get("world_size"):
        changes.append(f"world size {baseline.get('world_size')} and {candidate.get('world_size')}")
    return [f"Circumstances differ (baseline and candidate): {'; '.join(changes)}."] if changes else []


_WATCHED = (
    ("versions", "torch"),
    ("versions", "mindspore"),
    ("versions", "triton"),
    ("environment", "machine"),
    ("environment", "devices"),
    ("environment", "num_threads"),
)

_OF_ANY_FRAMEWORK = (("environment", "machine"),)
"""Entries that mean the same in every framework."""


def _show(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


_MOST_NAMED = 3


def other_dtypes(sites: Mapping[tuple[str, str], Collection[SiteKey]]) -> list[str]:
    """One sentence for each pair of different dtypes, with the number of their sites and the first of them."""
    return [
        f"{len(found)} {'site is' if len(found) == 1 else 'sites are'} {baseline} in the baseline and {candidate} in "
        f"the candidate, first {_named(found)}; floors follow the shorter of the two."
        for (baseline, candidate), found in sites.items()
    ]


def _named(sites: Collection[SiteKey]) -> str:
    """The first sites of one pair of dtypes in execution order."""
    names = [f"{phase_text(key.phase, key.stage)} of {label(key.path, key.slot)}" for key in islice(sites, _MOST_NAMED)]
    return f"{', '.join(names)}{more_text(len(sites) - len(names), 'site')}"


def other_models(baseline: Side, candidate: Side) -> list[str]:
    """One sentence for recordings of models that have no path in common, or nothing."""
    paths = [side.paths - {""} for side in (baseline, candidate)]
    if not all(paths) or paths[0] & paths[1]:
        return []
    return [
        f"The recordings are of different models, {baseline.model} and {candidate.model}: no module or parameter has "
        "the same path in both. Give recordings of one model, or --rename PATTERN=REPLACEMENT."
    ]


def not_forced(candidate: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence if some tensors of a forced run kept their own values, according to its `rank.json` files."""
    own = {site: why for content in candidate for site, why in content.get("not_forced", {}).items()}
    if not own:
        return []
    site, why = next(iter(own.items()))
    more = f" and {len(own) - 1} more" if len(own) > 1 else ""
    return [f"Not forced, so what is computed from it may carry earlier errors: {site} ({why}){more}."]


def scale_factors(baseline: float, candidate: float) -> list[tuple[float, str]]:
    """Factors that a wrong treatment of the loss scales would leave, with what to say about each."""
    found = []
    for name, scale in (("candidate", candidate), ("baseline", baseline)):
        if scale != 1.0:
            more, less = (scale, 1.0 / scale) if name == "candidate" else (1.0 / scale, scale)
            found.append((more, f"= the {name}'s loss scale {scale:g}: never divided out?"))
            found.append(
                (less, f"= 1/{scale:g}, one over the {name}'s loss scale: divided out without being applied, or twice?")
            )
    return found


SHOW_LOSS_SCALES = next(frozenset(tap.observe) for tap in TAPS if tap.name == "loss_scale")
"""Names in `record(observe=...)`, each of which makes a run record its loss scales."""


def scale_note(baseline: float, candidate: float) -> str:
    """A note on two runs with different loss scales; empty if they are equal."""
    if baseline == candidate:
        return ""
    scales = [f"{scale:g}" if scale != 1.0 else "none" for scale in (baseline, candidate)]
    return f"Loss scales differ ({scales[0]} in the baseline, {scales[1]} in the candidate); they are divided out."


FLOAT32_COEFFICIENTS = frozenset({"FusedAdam", "DeepSpeedCPUAdam"})
"""Optimizers that compute 1 - beta from a beta in float32: for 0.999 that is 1.3e-5 too small."""


def coefficient_error(contents: Iterable[Mapping[str, Any]]) -> float:
    """Relative error of 1 - beta in one of two runs, for betas up to 0.999, by their `rank.json` files."""
    optimizers = [optimizer for content in contents for optimizer in content.get("optimizers", ())]
    short = any(one.get("settings_in_float32") or one.get("type") in FLOAT32_COEFFICIENTS for one in optimizers)
    return UNIT_ROUNDOFF["float32"] / 1e-3 if short else 0.0


def reduced_in(facts: Iterable[RunFacts]) -> dict[str, str]:
    """The shorter dtype in which a run reduces a gradient over its ranks, by the path of its parameter."""
    found: dict[str, str] = {}
    for one in facts:
        for path, dtype in one.reduced_in.items():
            found[path] = max(found.get(path, ""), dtype, key=rounding)
    return found


def other_reductions(facts: Sequence[RunFacts]) -> list[str]:
    """One sentence for each pair of different dtypes in which two runs reduce gradients over ranks."""
    found: dict[tuple[str, ...], list[str]] = {}
    for path in reduced_in(facts):
        dtypes = tuple(one.reduced_in.get(path, "their own dtype") for one in facts)
        if dtypes[0] != dtypes[1]:
            found.setdefault(dtypes, []).append(path)
    return [
        f"{len(paths)} {'gradient is' if len(paths) == 1 else 'gradients are'} reduced over ranks in {baseline} in the "
        f"baseline and in {candidate} in the candidate, such as that of {paths[0]}; floors follow the shorter dtype."
        for (baseline, candidate), paths in found.items()
    ]


def approximate_in_one_run(modules: Mapping[str, str], runs: Sequence[Sequence[Mapping[str, Any]]]) -> frozenset[str]:
    """Paths of modules that approximate functions in one of two runs; see `run_floors.APPROXIMATED`.

    Args:
        modules: Class names by path.
        runs: The `rank.json` files of both.
    """
    flags = {one.get("surroundings", {}).get("torch", {}).get("cudnn_recurrent") for run in runs for one in run}
    if "True" not in flags or len(flags) == 1:
        return frozenset()
    return frozenset(path for path, name in modules.items() if name in RECURRENT)
