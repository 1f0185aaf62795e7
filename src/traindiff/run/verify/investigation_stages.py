"""The stages of an investigation: each turns results of runs into a question and its conclusion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from traindiff.analyse.compare import Comparison, Verification
from traindiff.analyse.compare.investigation import Stage
from traindiff.analyse.compare.verification import FailedRun
from traindiff.analyse.findings import before_text, finite, size_text, where_text
from traindiff.analyse.story import MEANINGS
from traindiff.run.verify.determinism import CONTROLS

Losses = Mapping[int, float]
"""The losses of a run, by step."""

_ASKS = {
    "repeats": "Does the baseline repeat itself?",
    "seeds": "How much does the seed matter?",
    "differs": "Does the candidate differ by more than noise?",
    "remains": f"Does it remain with {', '.join(CONTROLS.values())}?",
    "first-step": "Which step is the first that differs?",
    "first-site": "Which site is the first in it?",
    "pinned": "Which modules are wrong alone, given the baseline's tensors?",
    "operators": "Which operator in there is the first that differs?",
}
"""The question of each stage."""


def _stage(name: str, message: str, *, final: bool = False, **numbers: Any) -> Stage:
    return Stage(name=name, asks=_ASKS[name], message=message, numbers=numbers, final=final)


def repeats(again: Comparison) -> Stage:
    """Does the baseline repeat itself? `again` compares it with a second run of it."""
    first, other = again.first_bit_difference, again.first_divergence
    if again.verdict == "misaligned" and other is not None:
        message = (
            f"No, it is not the same training when it is called again. {where_text(other)}: {other.message} Prepare "
            "model, data and generators from scratch in each call; torch, NumPy and random are seeded."
        )
        return _stage("repeats", message, final=True, identical=False)
    if first is None:
        message = "Yes: run again, it gives the same bits."
        return _stage("repeats", message, identical=True)
    size = f", by {first.difference:.2g} (relative L2)" if math.isfinite(first.difference) else ""
    sites = len(again.differences) - again.words["identical"]
    message = (
        f"Not to the bit: it first differs at {where_text(first)}{size}, and in {sites} sites altogether. "
        "This is the baseline's own noise; nothing below it counts as a difference."
    )
    return _stage("repeats", message, identical=False, first=first.to_json())


def seeds(losses: Mapping[int, Losses], failed: Mapping[int, FailedRun] | None = None) -> Stage:
    """How much does the loss depend on the seed? Losses of the baseline, and runs that failed, are by seed."""
    fails = "".join(f" With seed {seed} the baseline fails. {run.message}" for seed, run in (failed or {}).items())
    last = _last_step(list(losses.values()))
    if last is None or len(losses) < 2:
        message = fails.lstrip() or "Not measured: no loss was recorded, or only one seed was run."
        return _stage("seeds", message, spread=None)
    of_seeds = {seed: one[last] for seed, one in losses.items()}
    known = [value for value in of_seeds.values() if math.isfinite(value)]
    spread = max(known) - min(known) if len(known) > 1 else None
    shown = ", ".join(f"{value:.6g} with seed {seed}" for seed, value in of_seeds.items())
    message = f"The loss of step {last} is {shown}" + ("." if spread is None else f": a spread of {spread:.2g}.")
    if len(known) < len(of_seeds):
        message += " A loss that is not finite is left out of the spread." if known else " No loss is finite."
    message += fails
    shown_losses = {str(seed): finite(value) for seed, value in of_seeds.items()}
    return _stage("seeds", message, step=last, spread=spread, losses=shown_losses)


def differs(
    free: Verification, losses: tuple[Losses, Losses], spread: float | None, *, has_tolerance: bool = False
) -> Stage:
    """Does the candidate differ by more than noise, or than the user's tolerance in its place?

    `spread` is that of the baseline's loss over seeds.
    """
    comparison, word = free.comparison, free.verdict
    last = _last_step(losses)
    apart = None if last is None else abs(losses[1][last] - losses[0][last])
    against = _against_seeds(last, apart, spread)
    numbers = {"verdict": word, "loss_apart": None if apart is None else finite(apart)}
    if free.failed is not None:
        far = f" Up to there: {MEANINGS[comparison.verdict]}." if comparison.steps else " It has recorded nothing."
        message = f"The candidate fails. {free.failed.message}{far}"
        return _stage("differs", message, final=comparison.verdict != "diverged", **numbers)
    if word == "misaligned" and comparison.first_divergence is not None:
        first = comparison.first_divergence
        message = f"It was not given the same to compute. {where_text(first)}: {first.message}"
    elif word == "diverged":
        count = len(comparison.findings)
        where = "1 site" if count == 1 else f"{count} sites"
        limit = "your tolerance" if has_tolerance else "the noise that was measured"
        message = f"Yes: at {where} the difference exceeds {limit}.{against}"
    else:
        message = f"No: {word}, {MEANINGS[word]}.{against}"
    return _stage("differs", message, final=word != "diverged", **numbers)


def remains(steady: Verification, alone: Mapping[str, str]) -> Stage:
    """Does the difference remain when nothing varies any more? `alone` has the verdict under each control alone."""
    numbers: dict[str, Any] = {"verdict": steady.verdict, "alone": dict(alone)}
    if steady.failed is not None and steady.verdict != "diverged":
        return unknown("candidate", steady.failed)
    if steady.verdict == "diverged":
        message = "Yes: it has nothing to do with randomness. What follows is measured so."
        return _stage("remains", message, **numbers)
    enough = [CONTROLS[name] for name, word in alone.items() if word in ("identical", "equivalent")]
    cause = f" {' or '.join(enough)} alone makes it vanish." if enough else " None of them alone makes it vanish."
    message = (
        f"No: so run, the two are {steady.verdict}.{cause} Look at what draws random numbers, or is not "
        "deterministic, rather than at the mathematics."
    )
    return _stage("remains", message, final=True, **numbers)


def unknown(who: str, failed: FailedRun) -> Stage:
    """The stage for a run that fails under the determinism controls."""
    message = f"That is not known: run so, the {who} fails. {failed.message}"
    return _stage("remains", message, final=True, verdict="incomplete", alone={})


def without_baseline(name: str, failed: FailedRun) -> Stage:
    """The stage of this name if a run of the baseline fails that it needs."""
    message = f"That is not known: the run {failed.run} of the baseline fails. {failed.message}"
    return _stage(name, message, final=True, verdict="incomplete")


def first_step(steady: Verification) -> Stage:
    """Which step is the first that differs?"""
    comparison, first = steady.comparison, steady.first_divergence
    assert first is not None
    before = [step for step in comparison.steps if step < first.step]
    message = f"Step {first.step}"
    message += (
        f": {len(before)} step{'s' if len(before) > 1 else ''} before it agree." if before else ", the first of all."
    )
    return _stage("first-step", message, step=first.step)


def first_site(steady: Verification) -> Stage:
    """Which site in that step is the first that differs?"""
    first = steady.first_divergence
    assert first is not None
    further = ". ".join(filter(None, (size_text(first), before_text(first))))
    message = f"{where_text(first)}: {first.message} {further[:1].upper()}{further[1:]}".rstrip()
    message = message if message.endswith(".") else f"{message}."
    return _stage("first-site", message, finding=first.to_json())


def pinned(steady: Verification) -> Stage:
    """Which operations are wrong alone?"""
    if not steady.pinned:
        return _stage("pinned", steady.pin_note or "Nothing was run again.", sites=[])
    found = [finding for one in steady.pinned for finding in one.comparison.findings]
    sites = list(dict.fromkeys(f"{finding.phase} of {finding.site}" for finding in found))
    more = f" and {len(sites) - 5} more" if len(sites) > 5 else ""
    message = f"{', '.join(sites[:5])}{more}. First {where_text(found[0])}: {found[0].message}" if found else (
        "None: given the baseline's tensors, every operation agrees. The difference adds up over several of them, or "
        "lies where it cannot be put in place."
    )  # fmt: skip
    return _stage("pinned", message, final=not found, sites=sites)


def operators(steady: Verification) -> Stage:
    """Which operator is the first that differs?"""
    zooms = steady.zoomed.comparison.zooms if steady.zoomed else ()
    if not zooms:
        message = steady.zoom_note or steady.pin_note or "No operator was recorded on the way to what is wrong."
        return _stage("operators", message, final=True, operators=[])
    first = min(zooms, key=lambda zoom: ("operator", "other-operators", "other-inputs", "none").index(zoom.cause))
    message = f"On the way to the {first.phase} of {first.site}: {first.message}"
    return _stage("operators", message, final=True, operators=[zoom.to_json() for zoom in zooms])


def _last_step(losses: Sequence[Losses]) -> int | None:
    common = set.intersection(*(set(one) for one in losses)) if losses else set()
    return max(common, default=None)


def _against_seeds(step: int | None, apart: float | None, spread: float | None) -> str:
    if apart is None:
        return ""
    if not math.isfinite(apart):
        return f" The loss of step {step} is not finite in one of them, or in both."
    share = f", {apart / spread:.2g} x what the seed changes" if spread else ""
    return f" The losses of step {step} are {apart:.2g} apart{share}."
