"""A comparison in plain sentences: what `print(comparison)` shows, and what the reports quote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from traindiff.comparison.groups import grouped
from traindiff.site import label

if TYPE_CHECKING:
    from traindiff.comparison.verdict import Comparison, Finding

MEANINGS = {
    "identical": "every recorded tensor has the same bits",
    "equivalent": "no difference exceeds its floor",
    "diverged": "the numbers part",
    "misaligned": "the runs were not given the same things to compute",
    "incomplete": "what could be compared agrees, but not everything could be",
}
"""What each word of a verdict means."""


def text(comparison: Comparison) -> str:
    """The baseline's own noise, the verdict, the first divergence and what limits the verdict."""
    own = own_noise(comparison)
    lines = [*([own, ""] if own else []), verdict(comparison)]
    if (first := comparison.first_divergence) is not None:
        lines += ["", f"First divergence: {place(first)}", f"  {first.says}"]
        lines += [f"  {line}" for line in (size_text(first), before_text(first)) if line]
        lines += [f"  {also}" for also in [also_at(comparison)] if also]
        if further := len(grouped(comparison.findings)) - 1:
            lines.append(f"  ({further} further finding{'s' if further > 1 else ''}.)")
    rest = limits(comparison)
    return "\n".join([*lines, *([""] if rest else []), *rest])


def verdict(comparison: Comparison) -> str:
    """The word, what it means, and over which steps."""
    word = comparison.verdict
    if word == "incomplete" and not comparison.steps:
        return f"{word}: nothing could be compared"
    calibration = "" if comparison.calibrated or word == "identical" else " (uncalibrated)"
    return f"{word}{calibration}: {MEANINGS[word]}, over {steps(comparison.steps)}"


def own_noise(comparison: Comparison) -> str:
    """How far the baseline was from itself when it was run again; empty where it was not."""
    own = (comparison.noise or {}).get("own")
    if own is None:
        return ""
    size, where = own["difference"], own["where"]
    if size == 0:
        return "Your baseline's own noise is 0: run again, it gives the same bits."
    if size is None:
        return f"Your baseline's own noise is without bound: run again, whole numbers or NaN differ in {where}."
    return f"Your baseline's own noise is {size:.2g} at most: run again, it differs by that in {where}."


def place(finding: Finding) -> str:
    """Step, phase and site of a finding."""
    micro = "" if finding.micro_step is None else f", micro-step {finding.micro_step}"
    return f"step {finding.step}{micro}, {phase(finding.phase, finding.stage)}, {finding.site}"


def phase(name: str, stage: str) -> str:
    """A phase with its stage."""
    return f"{name} ({stage})" if stage else name


def size_text(finding: Finding) -> str:
    """The size of a finding against its floor; empty where it has none."""
    if not math.isfinite(finding.difference) or not finding.floor:
        return ""
    return f"relative L2 difference {finding.difference:.3g} = {finding.ratio:.3g} x its floor of {finding.floor:.3g}"


def also_at(comparison: Comparison) -> str:
    """Where else the first finding was made in the same step; empty where it was not."""
    groups = grouped(comparison.findings)
    _, *more = groups[0].paths if groups else ("",)
    if not more:
        return ""
    named = ", ".join(more[:2]) + (", ..." if len(more) > 2 else ".")
    what = "group" if ".groups[" in more[0] else "parameter"
    return f"The same holds for {len(more)} more {what}{'s' if len(more) > 1 else ''}: {named}"


def representation_note(found: Sequence[Finding]) -> str:
    """What differs although the runs learn the same."""
    first = found[0]
    more = f" and at {len(found) - 1} more sites" if len(found) > 1 else ""
    return (
        f"The representation differs, not the computation: {place(first)}{more}, while no loss, gradient or update "
        f"does. {first.says}"
    )


def before_text(finding: Finding) -> str:
    """How far inputs agree; empty where the order of execution does not tell."""
    after = finding.evidence.get("after")
    return f"Everything before it agrees, up to {after}." if after else ""


def limits(comparison: Comparison) -> list[str]:
    """What was not compared, and other notes, one line each."""
    lines = []
    for side, missing in zip(("baseline", "candidate"), comparison.unaligned, strict=True):
        if missing:
            named = ", ".join(f"{label(one.path, one.slot)} ({one.phase})" for one in missing[:3])
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            lines.append(f"Only in the {side}: {named}{more}.")
    if all(comparison.unaligned):
        lines.append("If these are the same sites under other names: --rename PATTERN=REPLACEMENT.")
    return [*lines, *comparison.notes]


def steps(numbers: Sequence[int]) -> str:
    """`10 steps (0 to 9)`."""
    if not numbers:
        return "no step"
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    gaps = any(later != earlier + 1 for earlier, later in pairwise(numbers))
    return f"{len(numbers)} steps ({numbers[0]} to {numbers[-1]}{', with gaps' if gaps else ''})"
