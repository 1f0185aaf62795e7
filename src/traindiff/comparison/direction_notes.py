"""What a comparison says of the directions of gradients.

The rule of msprobe's gradient monitor (0.97 in the first step, at most 0.03 less from step to step) is a note and never
a finding: it is a fixed limit. Elements whose gradients are near zero turn around by rounding alone, so that most of
the legal variations of a training break it (24 of 27, measured on a small GPT), while a gradient that is wrong by a
factor of 2 keeps it. The verdict rests on floors.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

from traindiff.comparison.verdict import Comparison
from traindiff.directions import BrokenRule, Similarities
from traindiff.findings.sentences import more_text, steps_text

_NAMED = 3


def with_directions(comparison: Comparison, found: Similarities | None) -> Comparison:
    """The comparison with what was found of directions, and with the notes on it."""
    if found is None:
        return comparison
    return replace(comparison, directions=found, notes=(*comparison.notes, *direction_notes(found)))


def direction_notes(found: Similarities) -> list[str]:
    """Sentences: how similar directions are, where the rule is broken, what could not be compared."""
    shares = [(one.share, step) for one, step in zip(found.summary, found.steps, strict=False) if one.share is not None]
    notes = []
    if shares:
        least, step = min(shares)
        notes.append(
            f"Directions of gradients: {least:.4f} of all elements agree at least (in step {step}), "
            f"over {steps_text([step for _, step in shares])}."
        )
    notes += [broken_text(step, list(same)) for step, same in groupby(found.broken, key=lambda one: one.step)][:_NAMED]
    more = len({one.step for one in found.broken}) - _NAMED
    if more > 0:
        notes.append(f"The rule is broken in {more} more step{'s' if more > 1 else ''}.")
    if found.broken:
        notes.append("That rule is a fixed limit, which correct runs break too, so the verdict does not rest on it.")
    if not found.zeros_known:
        notes.append("One of the runs does not tell zero from negative, so the two count as one direction in both.")
    for side, paths in zip(("baseline", "candidate"), found.only, strict=True):
        if paths:
            notes.append(f"Directions only in the {side}: {paths[0]}{more_text(len(paths) - 1, 'parameter')}.")
    if found.unknown:
        path, why = next(iter(found.unknown.items()))
        more_unknown = more_text(len(found.unknown) - 1, "parameter")
        notes.append(f"Directions not compared: {path} ({why}){more_unknown}.")
    return notes


def broken_text(step: int, broken: list[BrokenRule]) -> str:
    """Where a step breaks the rule: the parameters with the smallest similarities first."""
    parameters = sorted((one for one in broken if one.parameter is not None), key=lambda one: one.similarity)
    named = [f"{one.parameter} ({_share_text(one)})" for one in parameters[:_NAMED]]
    together = [f"all parameters together ({_share_text(one)})" for one in broken if one.parameter is None]
    further = more_text(len(parameters) - _NAMED, "parameter")
    where = f"{', '.join([*together, *named])}{further}"
    return f"The 0.97 / 0.03 rule of direction similarity is broken in step {step}: {where}."


def _share_text(one: BrokenRule) -> str:
    return f"{one.similarity:.4f}" if one.before is None else f"{one.similarity:.4f} after {one.before:.4f}"
