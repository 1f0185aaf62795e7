"""What clipping did to gradients, and stages of gradients that a run did not need to record apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from traindiff.comparison.loss_scale import loss_scale
from traindiff.comparison.ranks import name_ranks
from traindiff.comparison.step_table import Entry, Key
from traindiff.comparison.verdict import Finding
from traindiff.observation import ALL_GRADIENTS
from traindiff.summary import largest

KIND = "clipping"
"""Kind of a finding about one run that clips its gradients where the other does not, or to something else."""

EFFECT = 1e-6
"""Clipping that multiplies by less than this below 1 has no effect: torch adds 1e-6 to the norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One call that clipped gradients.

    Attributes:
        entry: Of its limit.
        limit: The largest norm, or the largest magnitude of an element.
        norm: The norm that it found; None where elements are clipped.
        effective: Whether it changed the gradients.
        only: The ranks that called it, where others did not.
    """

    entry: Entry
    limit: float
    norm: float | None
    effective: bool
    only: tuple[int, ...] = ()

    @property
    def coefficient(self) -> float:
        """What it multiplied the gradients by; 1 where elements are clipped."""
        return 1.0 if self.norm is None or not self.effective else self.limit / (self.norm + 1e-6)

    @property
    def what(self) -> str:
        """What it does, in words that follow "clips"."""
        where = f" on {name_ranks(self.only, capital=False)} only" if self.only else ""
        return (
            f"elements of gradients to {self.limit:g}{where}"
            if self.norm is None
            else f"gradients to a norm of {self.limit:g}{where}"
        )


def is_clip(key: Key) -> bool:
    """Whether this is the norm or the limit of a call that clips."""
    return key[:3] == ("grad", "clipped", ALL_GRADIENTS)


def clips(table: Mapping[Key, Entry]) -> list[Clip]:
    """The calls of a step that clip gradients, in the order of execution."""
    found = []
    held = {part.rank for key, entry in table.items() if key[:2] == ("grad", "") for part in entry.parts}
    for key, entry in table.items():
        if not is_clip(key) or key.slot not in ("max_norm", "max_value") or entry.unobserved:
            continue
        limit = float(entry.summary["sum"])
        norm = None if key.slot == "max_value" else _norm(table, key)
        if key.slot == "max_norm" and norm is None:
            continue
        effective = _reaches(table, limit) if norm is None else limit / (norm + 1e-6) < 1.0 - EFFECT
        ranks = {part.rank for part in entry.parts}
        only = tuple(sorted(ranks)) if ranks < held else ()
        found.append(Clip(entry=entry, limit=limit, norm=norm, effective=effective, only=only))
    return found


def clip_factor(baseline: list[Clip], candidate: list[Clip]) -> list[tuple[float, str]]:
    """The factor that clipping leaves between the gradients of two runs, and what to say of it."""
    if len(baseline) > 1 or len(candidate) > 1:
        return []
    factor = math.prod(one.coefficient for one in candidate) / math.prod(one.coefficient for one in baseline)
    return [(factor, "= what clipping makes of them")] if abs(factor - 1.0) > EFFECT else []


def clipping_findings(baseline: list[Clip], candidate: list[Clip], *, step: int) -> Iterator[Finding]:
    """Clipping that one run does and the other does not, or to something else, where it has an effect."""
    sides = (("baseline", baseline), ("candidate", candidate))
    for (name, own), (other, others) in (sides, sides[::-1]):
        acting = [one for one in own if one.effective]
        if acting and not others:
            first = acting[0]
            says = f"The {name} clips {first.what}; the {other} does not clip."
            if first.norm is not None:
                where = " there" if first.only else ""
                says += f" Their norm was {first.norm:.4g}, so all of them{where} were multiplied by "
                says += f"{first.coefficient:.4g}."
            yield _finding(first, step=step, says=says, run=name)
    if len(baseline) != len(candidate):
        return
    for left, right in zip(baseline, candidate, strict=True):
        if (left.effective or right.effective) and left.what != right.what:
            says = f"The baseline clips {left.what}, the candidate clips {right.what}."
            yield _finding(left, step=step, says=says, run="baseline")


def clipping_note(baseline: list[Clip], candidate: list[Clip]) -> str:
    """What to say of clipping without an effect that only one run does; empty where there is none."""
    for name, own, others in (("baseline", baseline, candidate), ("candidate", candidate, baseline)):
        if own and not others and not any(one.effective for one in own):
            return f"Only the {name} clips {own[0].what}; that changed nothing."
    return ""


def with_stages(table: Mapping[Key, Entry], other: Mapping[Key, Entry], *, asked: bool) -> dict[Key, Entry]:
    """The table with those stages of gradients that the other run has: what nothing has changed is what came next.

    Args:
        table: A run's step.
        other: The same step of the other run.
        asked: Whether the run was asked to record the stages; if not, gradients before clipping are not known.
    """
    has_scale, result = loss_scale(table) != 1.0, dict(table)
    seen = [entry.order for key, entry in table.items() if key[:2] == ("grad", "")]
    if not seen or (not asked and (has_scale or clips(table))):
        return result
    for key in other:
        if key.phase != "grad" or key.stage not in ("reduced", "unscaled") or key in table:
            continue
        before = table.get(key._replace(stage="reduced")) if key.stage == "unscaled" and not has_scale else None
        held = before or table.get(key._replace(stage=""))
        if held is not None:
            result[key] = replace(held, key=key, order=min(seen) - 1)
    return result


def _norm(table: Mapping[Key, Entry], key: Key) -> float | None:
    for slot in ("norm", "squared_norm"):
        entry = table.get(key._replace(slot=slot))
        if entry is not None and not entry.unobserved:
            value = float(entry.summary["sum"])
            value = value if slot == "norm" else math.sqrt(max(0.0, value))
            return value if math.isfinite(value) and not int(entry.summary["nan"]) else None
    return None


def _reaches(table: Mapping[Key, Entry], limit: float) -> bool:
    """Whether the largest element of any gradient is as large as elements may be."""
    gradients = (entry for key, entry in table.items() if key[:2] == ("grad", "") and not entry.unobserved)
    return any(abs(float(largest(entry.summary)) / limit - 1.0) < 1e-6 for entry in gradients if limit)


def _finding(clip: Clip, *, step: int, says: str, run: str) -> Finding:
    key = clip.entry.key
    evidence = {"run": run, "limit": clip.limit, "norm": clip.norm, "coefficient": clip.coefficient}
    return Finding(
        step=step, micro_step=None, rank=None, phase=key.phase, stage=key.stage, path=key.path, slot=key.slot,
        call=key.call, order=clip.entry.order, kind=KIND, difference=abs(clip.coefficient - 1.0) or math.inf,
        floor=0.0, says=says, evidence=evidence,
    )  # fmt: skip
