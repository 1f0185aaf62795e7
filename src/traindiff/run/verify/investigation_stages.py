"""The stages of an investigation: each turns results of runs into a question and its conclusion."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from traindiff.analyse.compare import Comparison, Verification
from traindiff.analyse.compare.investigation import Stage
from traindiff.analyse.compare.verification import FailedRun
from traindiff.analyse.findings import before_text, finite, size_text, where_text
from traindiff.analyse.story import MEANINGS
from traindiff.run.verify.determinism import CONTROLS

Losses = Mapping[int, float]
"""The losses of a run, by step."""

_REMAINS = f"Does it remain with {', '.join(CONTROLS.values())}?"


def repeats(bits: Comparison, tolerant: Comparison) -> Stage:
    """Does the baseline repeat itself? `bits` reports every difference, `tolerant` is judged by noise floors."""
    asks = "Does the baseline repeat itself?"
    first = bits.first_divergence
    if tolerant.verdict == "misaligned" and tolerant.first_divergence is not None:
        other = tolerant.first_divergence
        message = (
            f"No, it is not the same training when it is called again. {where_text(other)}: {other.message} Prepare "
            "model, data and generators from scratch in each call; torch, NumPy and random are seeded."
        )
        return Stage(name="repeats", asks=asks, message=message, numbers={"identical": False}, final=True)
    if first is None:
        message = "Yes: run again, it gives the same bits."
        return Stage(name="repeats", asks=asks, message=message, numbers={"identical": True})
    size = f", by {first.difference:.2g} (relative L2)" if math.isfinite(first.difference) else ""
    message = (
        f"Not to the bit: it first differs at {where_text(first)}{size}, and in {len(bits.findings)} sites altogether. "
        "This is the baseline's own noise; nothing below it counts as a difference."
    )
    return Stage(name="repeats", asks=asks, message=message, numbers={"identical": False, "first": first.to_json()})


def seeds(losses: Mapping[int, Losses], failed: Mapping[int, FailedRun] | None = None) -> Stage:
    """How much does the loss depend on the seed? Losses of the baseline, and runs that failed, are by seed."""
    asks = "How much does the seed matter?"
    fails = "".join(f" With seed {seed} the baseline fails. {run.message}" for seed, run in (failed or {}).items())
    last = _last_step(list(losses.values()))
    if last is None or len(losses) < 2:
        message = fails.lstrip() or "Not measured: no loss was recorded, or only one seed was run."
        return Stage(name="seeds", asks=asks, message=message, numbers={"spread": None})
    of_seeds = {seed: one[last] for seed, one in losses.items()}
    known = [value for value in of_seeds.values() if math.isfinite(value)]
    spread = max(known) - min(known) if len(known) > 1 else None
    shown = ", ".join(f"{value:.6g} with seed {seed}" for seed, value in of_seeds.items())
    message = f"The loss of step {last} is {shown}" + ("." if spread is None else f": a spread of {spread:.2g}.")
    if len(known) < len(of_seeds):
        message += " A loss that is not finite is left out of the spread." if known else " No loss is finite."
    message += fails
    return Stage(
        name="seeds", asks=asks, message=message,
        numbers={
            "step": last, "spread": spread, "losses": {str(seed): finite(value) for seed, value in of_seeds.items()},
        },
    )  # fmt: skip


def differs(free: Verification, losses: tuple[Losses, Losses], spread: float | None) -> Stage:
    """Does the candidate differ by more than noise? `spread` is that of the baseline's loss over seeds."""
    asks = "Does the candidate differ by more than noise?"
    comparison, word = free.comparison, free.verdict
    last = _last_step(losses)
    apart = None if last is None else abs(losses[1][last] - losses[0][last])
    against = _against_seeds(last, apart, spread)
    numbers = {"verdict": word, "loss_apart": None if apart is None else finite(apart)}
    if free.failed is not None:
        far = f" Up to there: {MEANINGS[comparison.verdict]}." if comparison.steps else " It has recorded nothing."
        message = f"The candidate fails. {free.failed.message}{far}"
        final = comparison.verdict != "diverged"
        return Stage(name="differs", asks=asks, message=message, numbers=numbers, final=final)
    if word == "misaligned" and comparison.first_divergence is not None:
        first = comparison.first_divergence
        message = f"It was not given the same to compute. {where_text(first)}: {first.message}"
    elif word == "diverged":
        count = len(comparison.findings)
        where = "1 site" if count == 1 else f"{count} sites"
        message = f"Yes: at {where} the difference exceeds the noise that was measured.{against}"
    else:
        message = f"No: {word}, {MEANINGS[word]}.{against}"
    return Stage(name="differs", asks=asks, message=message, numbers=numbers, final=word != "diverged")


def remains(steady: Verification, alone: Mapping[str, str]) -> Stage:
    """Does the difference remain when nothing varies any more? `alone` has the verdict under each control alone."""
    numbers = {"verdict": steady.verdict, "alone": dict(alone)}
    if steady.failed is not None and steady.verdict != "diverged":
        return unknown("candidate", steady.failed)
    if steady.verdict == "diverged":
        message = "Yes: it has nothing to do with randomness. What follows is measured so."
        return Stage(name="remains", asks=_REMAINS, message=message, numbers=numbers)
    enough = [CONTROLS[name] for name, word in alone.items() if word in ("identical", "equivalent")]
    cause = f" {' or '.join(enough)} alone makes it vanish." if enough else " None of them alone makes it vanish."
    message = (
        f"No: so run, the two are {steady.verdict}.{cause} Look at what draws random numbers, or is not "
        "deterministic, rather than at the mathematics."
    )
    return Stage(name="remains", asks=_REMAINS, message=message, numbers=numbers, final=True)


def unknown(who: str, failed: FailedRun) -> Stage:
    """The stage for a run that fails under the determinism controls."""
    message = f"That is not known: run so, the {who} fails. {failed.message}"
    numbers = {"verdict": "incomplete", "alone": {}}
    return Stage(name="remains", asks=_REMAINS, message=message, numbers=numbers, final=True)


def first_step(steady: Verification) -> Stage:
    """Which step is the first that differs?"""
    comparison, first = steady.comparison, steady.first_divergence
    assert first is not None
    before = [step for step in comparison.steps if step < first.step]
    message = f"Step {first.step}"
    message += (
        f": {len(before)} step{'s' if len(before) > 1 else ''} before it agree." if before else ", the first of all."
    )
    return Stage(
        name="first-step", asks="Which step is the first that differs?", message=message, numbers={"step": first.step}
    )


def first_site(steady: Verification) -> Stage:
    """Which site in that step is the first that differs?"""
    first = steady.first_divergence
    assert first is not None
    further = ". ".join(filter(None, (size_text(first), before_text(first))))
    message = f"{where_text(first)}: {first.message} {further[:1].upper()}{further[1:]}".rstrip()
    message = message if message.endswith(".") else f"{message}."
    return Stage(
        name="first-site", asks="Which site is the first in it?", message=message, numbers={"finding": first.to_json()}
    )


def pinned(steady: Verification) -> Stage:
    """Which operations are wrong alone?"""
    asks = "Which modules are wrong alone, given the baseline's tensors?"
    if not steady.pinned:
        message = steady.pin_note or "Nothing was run again."
        return Stage(name="pinned", asks=asks, message=message, numbers={"sites": []})
    found = [finding for one in steady.pinned for finding in one.comparison.findings]
    sites = list(dict.fromkeys(f"{finding.phase} of {finding.site}" for finding in found))
    more = f" and {len(sites) - 5} more" if len(sites) > 5 else ""
    message = f"{', '.join(sites[:5])}{more}. First {where_text(found[0])}: {found[0].message}" if found else (
        "None: given the baseline's tensors, every operation agrees. The difference adds up over several of them, or "
        "lies where it cannot be put in place."
    )  # fmt: skip
    return Stage(name="pinned", asks=asks, message=message, numbers={"sites": sites}, final=not found)


def operators(steady: Verification) -> Stage:
    """Which operator is the first that differs?"""
    asks = "Which operator in there is the first that differs?"
    zooms = steady.zoomed.comparison.zooms if steady.zoomed else ()
    if not zooms:
        message = steady.zoom_note or steady.pin_note or "No operator was recorded on the way to what is wrong."
        return Stage(name="operators", asks=asks, message=message, numbers={"operators": []}, final=True)
    first = min(zooms, key=lambda zoom: ("operator", "other-operators", "other-inputs", "none").index(zoom.cause))
    message = f"On the way to the {first.phase} of {first.site}: {first.message}"
    return Stage(
        name="operators", asks=asks, message=message, numbers={"operators": [zoom.to_json() for zoom in zooms]},
        final=True,
    )  # fmt: skip


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
