"""What a continued run begins with, if it is what the baseline had in an earlier step: data, settings, generators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from traindiff.analyse.align.beginnings import Beginning, beginnings, same_bits
from traindiff.analyse.align.exact import EXACT_KINDS
from traindiff.analyse.compare.verdict import Comparison
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.renames import Rename
from traindiff.storage import Recording

_KINDS = EXACT_KINDS - {"initial-parameter"}


def with_earlier_states(comparison: Comparison, runs: tuple[Recording, Recording], rename: Rename) -> Comparison:
    """The comparison; findings at the first step of a continued run say in which step the baseline had the same.

    Args:
        comparison: The comparison.
        runs: Baseline and candidate. The baseline is read once more if there is something to look for.
        rename: Turns the candidate's paths into the baseline's.
    """
    found = [one for one in comparison.findings if one.kind in _KINDS]
    if not found or not comparison.steps or comparison.steps[0] == 0:
        return comparison
    first = next(beginnings(runs[1], rename), None)
    if first is None or first.step != comparison.steps[0] or all(one.step != first.step for one in found):
        return comparison
    earlier = [one for one in beginnings(runs[0]) if one.optimizer == first.optimizer and one.step < first.step]
    if not earlier:
        return comparison
    told = tuple(
        replace(one, message=f"{one.message} {more}")
        if one in found and one.step == first.step and (more := _remark(one, first, earlier))
        else one
        for one in comparison.findings
    )
    return replace(comparison, findings=told)


def _remark(finding: Finding, first: Beginning, earlier: Sequence[Beginning]) -> str:
    """Sentences that say in which step the baseline had the same, and what that means; empty if in none."""
    step, own = None, first.step
    if finding.kind == "batch":
        step = next((one.step for one in earlier if _has_batch(one, first)), None)
        why = "the data begins again" if step == earlier[0].step else "the data goes on at another place"
        return "" if step is None else f"Batch {own} of the candidate is the baseline's batch {step}: {why}."
    if finding.kind == "random-state":
        step = next((one.step for one in earlier if _has_random_state(one, first)), None)
        if step is None:
            return "If the candidate continues from a checkpoint: was the state of the generator restored?"
        return f"It is the state with which the baseline began step {step}: the generator was not restored."
    value = finding.evidence.get("candidate")
    settings = [(one.step, number) for one in earlier for (_, slot), number in one.settings.items()
                if slot == finding.slot]  # fmt: skip
    step = next((number for number, held in settings if held == value), None)
    if step is None:
        return ""
    what = ", as if the scheduler had not been restored" if step == earlier[0].step and finding.slot == "lr" else ""
    return f"The baseline had this value in step {step}{what}."


def _has_batch(one: Beginning, first: Beginning) -> bool:
    return bool(first.batch) and all(
        site in one.batch and same_bits(entry, one.batch[site]) for site, entry in first.batch.items()
    )


def _has_random_state(one: Beginning, first: Beginning) -> bool:
    return any(slot in one.random and same_bits(entry, one.random[slot]) for slot, entry in first.random.items())
