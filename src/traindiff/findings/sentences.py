"""Findings in words: where they are, how large, on which ranks and in which steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traindiff.findings import Finding


def where_text(finding: Finding) -> str:
    """Step, phase and site of a finding."""
    micro = "" if finding.micro_step is None else f", micro-step {finding.micro_step}"
    return f"step {finding.step}{micro}, {phase_text(finding.phase, finding.stage)}, {finding.site}"


def phase_text(name: str, stage: str) -> str:
    """A phase with its stage."""
    return f"{name} ({stage})" if stage else name


def size_text(finding: Finding) -> str:
    """The size of a finding against its floor; empty where it has none."""
    if not math.isfinite(finding.difference) or not finding.floor:
        return ""
    return f"relative L2 difference {finding.difference:.3g} = {finding.ratio:.3g} x its floor of {finding.floor:.3g}"


def before_text(finding: Finding) -> str:
    """How far inputs agree; empty where the order of execution does not tell."""
    after = finding.evidence.get("after")
    return f"Everything before it agrees, up to {after}." if after else ""


def more_text(count: int, what: str, *, before: str = " and") -> str:
    """` and 2 more sites`; empty for none."""
    return f"{before} {count} more {what}{'s' if count > 1 else ''}" if count > 0 else ""


def also_text(paths: Sequence[str]) -> str:
    """Where else the same was found, given the first place and the others; empty where it was found once."""
    more = paths[1:]
    if not more:
        return ""
    named = ", ".join(more[:2]) + (", ..." if len(more) > 2 else ".")
    what = "group" if ".groups[" in more[0] else "parameter"
    return f"The same holds for {len(more)} more {what}{'s' if len(more) > 1 else ''}: {named}"


def steps_text(numbers: Sequence[int]) -> str:
    """`10 steps (0 to 9)`."""
    if not numbers:
        return "no step"
    if len(numbers) == 1:
        return f"step {numbers[0]}"
    gaps = any(later != earlier + 1 for earlier, later in pairwise(numbers))
    return f"{len(numbers)} steps ({numbers[0]} to {numbers[-1]}{', with gaps' if gaps else ''})"


def ranks_text(numbers: Sequence[int], *, capital: bool = True) -> str:
    """`Rank 1`, `Ranks 0, 2 and 3`."""
    word = ("Rank" if capital else "rank") + ("s" if len(numbers) > 1 else "")
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    shown = [str(number) for number in numbers[:8]]
    if len(numbers) > 8:
        return f"{word} {', '.join(shown)} and {len(numbers) - 8} more"
    return f"{word} {', '.join(shown[:-1])} and {shown[-1]}"


def micro_steps_text(steps: Sequence[int]) -> str:
    """`micro-step 0`, `micro-steps 0, 2 and 3`."""
    if len(steps) == 1:
        return f"micro-step {steps[0]}"
    return f"micro-steps {', '.join(map(str, steps[:-1]))} and {steps[-1]}"
