"""Which passes of a step two runs have in common: all, or those from which something follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from math import prod

from traindiff.analyse.align.side import RUNS
from traindiff.analyse.findings import more_text
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.run_steps import RunStep
from traindiff.analyse.merge.site import StepTable
from traindiff.core.observation import ITSELF

_Inputs = Mapping[tuple[str, str, int, int], tuple[int, ...]]
"""Shapes of the batch by path, slot, call and micro-step."""


class UsedPasses:
    """Leaves passes from which nothing follows out of steps in which only one run has them.

    Args:
        rename: Turns the candidate's paths into the baseline's.

    Attributes:
        left_out: By run, the steps in which it has such passes and the other run does not.
    """

    def __init__(self, rename: Rename) -> None:
        self._renames: tuple[Rename, Rename] = (str, rename)
        self.left_out: tuple[list[int], list[int]] = ([], [])

    def in_common(self, baseline: RunStep, candidate: RunStep) -> tuple[RunStep, RunStep]:
        """The step of both runs, without such passes of one or both if only then both were given as many samples.

        A micro-step whose gradients are lost by mistake stays: without it, the run would have fewer samples.
        """
        steps = baseline, candidate
        views = [[one, rest] if (rest := _without_idle(one)) else [one] for one in steps]
        if views == [[baseline], [candidate]]:
            return steps
        for same in (_alike, _as_many):
            for own, other in product(*views):
                tables = own.table, other.table
                if same(*(_inputs(table, rename) for table, rename in zip(tables, self._renames, strict=True))):
                    for left_out, one, whole in zip(self.left_out, (own, other), steps, strict=True):
                        if one is not whole:
                            left_out.append(one.step)
                    return own, other
        return steps

    def notes(self) -> Iterator[str]:
        """A sentence for each run of which passes were left out."""
        for name, steps in zip(RUNS, self.left_out, strict=True):
            if steps:
                yield (
                    f"{name}: in step {steps[0]}{more_text(len(steps) - 1, 'step')}, passes from which nothing follows "
                    "were left out, because the other run does not have them: no gradient flows through them, or it "
                    "was cleared before a step read it."
                )


def _without_idle(step: RunStep) -> RunStep | None:
    if step.without_idle is None:
        return None
    earlier, table = step.without_idle
    return replace(step, earlier=earlier, table=table)


def _inputs(table: StepTable, rename: Callable[[str], str]) -> _Inputs:
    return {
        (rename(key.path), key.slot, key.call, key.micro_step): entry.shape
        for key, entry in table.items()
        if key[:2] == ("batch", "") and key.path not in ("rng", ITSELF) and not entry.unobserved
    }


def _alike(baseline: _Inputs, candidate: _Inputs) -> bool:
    return baseline == candidate


def _as_many(baseline: _Inputs, candidate: _Inputs) -> bool:
    """True if both runs were given as many elements, in whatever calls and micro-steps."""
    sizes = [{key[:2]: 0 for key in one} for one in (baseline, candidate)]
    for size, one in zip(sizes, (baseline, candidate), strict=True):
        for key, shape in one.items():
            size[key[:2]] += prod(shape)
    return sizes[0] == sizes[1]
