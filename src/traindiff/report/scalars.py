"""A recording as scalars over its steps, for tools that plot those."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from traindiff.errors import ConfigError, Problem
from traindiff.merging.run_steps import run_steps
from traindiff.merging.step_table import Entry, Key
from traindiff.observation import ALL_GRADIENTS, SAMPLE
from traindiff.recording import Recording
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.site import PHASES, ROOT, matches
from traindiff.steps import ALL_STEPS, StepSelection
from traindiff.summary import largest, norm, number


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Which tensors are given beside the scalars that a run has by itself.

    Attributes:
        site: Glob over canonical paths, or over `path slot`; empty for none.
        phases: Phases; empty for all.
        steps: Steps.
    """

    site: str = ""
    phases: tuple[str, ...] = ()
    steps: StepSelection = ALL_STEPS


Scalars = dict[str, float]
"""By name: a number. NaN and infinities are as they are."""


def check_phases(phases: tuple[str, ...]) -> None:
    """Raise `ConfigError` for what is not a phase.

    Args:
        phases: What was given.
    """
    problems = [
        Problem.unknown_name(where=f"--phase {name}", kind="a phase", found=name, known=PHASES)
        for name in phases
        if name not in PHASES
    ]
    if problems:
        raise ConfigError("export", problems, consequence="nothing was exported")


def scalars(recording: Recording, wanted: Wanted) -> Iterator[tuple[int, Scalars]]:
    """The scalars of each finished step: losses, what was logged, settings of the optimizer, the gradient norm.

    Of the tensors that are wanted, the L2 norm and the largest |x| are given as well.

    Args:
        recording: The run; its ranks are merged.
        wanted: Which tensors are given.

    Yields:
        The step, and its scalars by name.
    """
    for step in run_steps(recording):
        if step.finished and step.step in wanted.steps:
            found: Scalars = {}
            squares: list[float] = []
            for key, entry in step.table.items():
                if entry.unobserved or key.stage == SAMPLE or entry.dtype not in UNIT_ROUNDOFF:
                    continue
                if key.phase == "grad" and key.slot == "grad" and not key.stage:
                    squares.append(float(entry.summary["sum_of_squares"]))
                found |= _of_entry(key, entry, wanted)
            if squares:
                found[f"grad/{ALL_GRADIENTS} norm"] = math.sqrt(math.fsum(squares))
            yield step.step, found
        step.release()


def _of_entry(key: Key, entry: Entry, wanted: Wanted) -> Scalars:
    name = f"{key.phase}{f'.{key.stage}' if key.stage else ''}/{key.path or ROOT} {key.slot}"
    name += f" call {key.call}" if key.call else ""
    name += f" micro-step {key.micro_step}" if key.micro_step else ""
    if entry.shape == () and int(entry.summary["count"]) == 1 and (key.phase == "loss" or key.group):
        return {name: number(entry.summary)}
    if not wanted.site or (wanted.phases and key.phase not in wanted.phases):
        return {}
    if not matches(wanted.site, key.path) and not matches(wanted.site, f"{key.path or ROOT} {key.slot}"):
        return {}
    return {f"{name} norm": float(norm(entry.summary)), f"{name} largest": float(largest(entry.summary))}
