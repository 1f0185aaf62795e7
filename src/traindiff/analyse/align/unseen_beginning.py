"""Recordings that begin in mid-training: what the parameters differ by may be the drift of the steps before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from traindiff.analyse.merge.distance import Pair, equal_bits
from traindiff.core.observation import BEFORE
from traindiff.core.summary import distance, norm_of
from traindiff.storage import Run

MOST_DRIFT = 0.3
"""Relative difference of all parameters together above which runs count as begun otherwise.

Models of other seeds differ by 1 or more; a small MLP in bfloat16 parts by 0.012 in 20 legal steps. Steps that were not
compared may part equal models by any amount: below this limit, a note says by how much.
"""


def steps_before(runs: Sequence[Run], step: int, pairs: Iterable[Pair] = ()) -> int:
    """Number of steps before a step that the training of all runs had, and nobody compares; 0 if it is not known.

    That is steps in which all runs had been attached. A run that continues another one had the steps before too. They
    count if the parameters are not held against each other, because rounding has parted them (see `with_beginning`).

    Args:
        runs: The runs.
        step: The first that they have in common.
        pairs: Its sites.
    """
    begun = [run.run.get("first_step") for run in runs]
    known = [one for one in begun if isinstance(one, int)]
    if len(known) < len(begun):
        return 0
    are_held = any(pair.baseline.key[:2] == ("param", BEFORE) and pair.baseline.key.slot == "value" for pair in pairs)
    return max(0, step - (max(known) if are_held else min(known)))


def drift(parameters: Iterable[Pair], num_steps: int) -> float:
    """Relative difference of all parameters together that steps which were not compared may have left.

    Args:
        parameters: The parameters after these steps.
        num_steps: Number of these steps.

    Returns:
        Infinity without such steps, or if it is more than drift can be, see `MOST_DRIFT`.
    """
    if not num_steps:
        return math.inf
    apart = size = 0.0
    for pair in parameters:
        if pair.baseline.shape != pair.candidate.shape:
            return math.inf
        apart += 0.0 if equal_bits(pair) else float(distance(pair.baseline.summary, pair.candidate.summary)) ** 2
        size += norm_of(pair.baseline.summary) ** 2
    whole = math.sqrt(apart) / math.sqrt(size) if size else math.inf if apart else 0.0
    return whole if whole <= MOST_DRIFT else math.inf
