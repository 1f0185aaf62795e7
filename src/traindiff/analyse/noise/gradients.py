"""Noise of gradients: terms that are summed, elements that are only noise, and a factor that all share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from traindiff.analyse.merge.distance import Pair, equal_bits
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.uncalibrated import Floors
from traindiff.core.shards import Shard
from traindiff.core.summary import UNIT_ROUNDOFF, largest, norm_of

NOISE_SIZE = 8.0
"""An element that is mathematically zero is at most this many times the gradient's error per element."""

_ONE_SIGN = 0.5
"""Share of what terms of one size and one sign would add up to, above which they may be that."""

COMMON_SHARE = 0.6
"""Share of the gradients that must follow one factor for it to count as common."""


def common_factor(fits: Sequence[float], limits: Sequence[float]) -> float | None:
    """The factor between the gradients of the two runs, if most share one that is not 1.

    Clipping to a norm multiplies all gradients by a factor that depends on each of them, so one wrong gradient changes
    them all. A wrongly scaled loss scales them all. If the common factor is not taken out, the first gradient is blamed
    for either.

    Args:
        fits: Factor of each gradient of one call of an optimizer: of its elements, or of its norm.
        limits: How far noise moves each of these.
    """
    if len(fits) < 3:
        return None
    factor = median(fits)
    if factor == 0.0 or not math.isfinite(factor):
        return None
    near = [limit for s, limit in zip(fits, limits, strict=True) if abs(s / factor - 1.0) <= max(limit, 1e-6)]
    # A common factor is visible if it exceeds the floor of the least noisy gradient that follows it.
    return factor if len(near) >= COMMON_SHARE * len(fits) and abs(factor - 1.0) > min(near) else None


def median(numbers: Iterable[float]) -> float:
    """The median of at least one number; NaN if one is NaN. Not by NumPy, which loads its masked arrays for it."""
    ordered = sorted(numbers)
    if any(map(math.isnan, ordered)):
        return math.nan
    middle = len(ordered) // 2
    found = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2.0
    return found + 0.0  # never -0.0, as NumPy has it


Kernel = Literal["accurate", "one by one", "lookup", "bag"]
"""How a module's gradients may be summed in a short dtype: in a longer one, as products of matrices and convolutions
do; or one by one, as LayerNorm, embeddings and bags of embeddings do on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms that a module's bias sums to its gradient: the gradient of the module's first output.

    Attributes:
        norm: Its norm.
        count: Its elements.
        summed: Number of elements that each mean of the module is taken of, at most; 0 if it is no norm over positions.
        dtype: The shorter dtype of theirs in the two runs; empty if unknown. Under autocast it may be shorter than the
            gradient's.
        kernel: How they may be summed in a short dtype.
    """

    norm: float
    count: int
    summed: float = 0.0
    dtype: str = ""
    kernel: Kernel = "accurate"


def shorter(*dtypes: str) -> str:
    """The dtype that rounds most."""
    return max(dtypes, key=lambda dtype: UNIT_ROUNDOFF.get(dtype, 0.0))


NO_CLASSES: Mapping[str, str] = MappingProxyType({})


def terms_by_module(
    pairs: Iterable[Pair], classes: Mapping[str, str] = NO_CLASSES, alone: Iterable[MergedSite] = ()
) -> dict[str, Terms]:
    """Terms by path of the module, over all its calls.

    Args:
        pairs: Of a step.
        classes: Class names of norms, other than LayerNorm, and of embeddings, by path.
        alone: Entries that are in no pair: of modules that only one run calls, or whose rows cannot be brought
            together. They tell the terms of a module that no pair does.
    """
    found: dict[str, Terms] = {}
    channels: dict[str, int] = {}
    summed: dict[str, float] = {}
    pairs = list(pairs)
    paired = {pair.baseline.key.path for pair in pairs if pair.baseline.key.phase == "backward"}
    others: dict[SiteKey, MergedSite] = {}
    for entry in alone:
        if entry.key.phase == "backward" and entry.key.path not in paired:
            others.setdefault(entry.key, entry)
    for pair in (*pairs, *(Pair(baseline=entry, candidate=entry) for entry in others.values())):
        key, summary = pair.baseline.key, pair.baseline.summary
        if key.slot == "buffer" and key.path.endswith(".running_mean") and pair.baseline.shape:
            channels[key.path.rpartition(".")[0]] = pair.baseline.shape[0]
        if key.phase == "backward" and key.slot == "output[0]":
            before = found.get(key.path, Terms(norm=0.0, count=0))
            size, count = math.hypot(before.norm, norm_of(summary)), before.count + int(summary["count"])
            dtype = shorter(before.dtype, pair.baseline.dtype, pair.candidate.dtype)
            found[key.path] = Terms(norm=size, count=count, dtype=dtype)
            name = classes.get(key.path, "")
            if "Norm" in name and len(pair.baseline.shape) > 2:
                # Of [samples, channels, positions...] an InstanceNorm sums positions, a GroupNorm also channels.
                first = 2 if "Instance" in name else 1
                summed[key.path] = float(math.prod(pair.baseline.shape[first:]))
    for path, number in channels.items():
        if path in found:
            summed.setdefault(path, found[path].count / number)
    matrices = _by_weights(pairs)
    for path, terms in found.items():
        kernel = _kernel(classes.get(path, ""), of_matrix=path in matrices)
        found[path] = replace(terms, summed=summed.get(path, 0.0), kernel=kernel)
    return {**matrices, **found}


def reduced_terms(terms: Mapping[str, Terms], factor: float) -> Mapping[str, Terms]:
    """The terms of gradients that were multiplied by a factor after the backward pass."""
    if factor == 1.0:
        return terms
    # Without a dtype, they were estimated from the gradient of a weight, which was multiplied, too.
    return {path: replace(one, norm=factor * one.norm) if one.dtype else one for path, one in terms.items()}


def _kernel(name: str, *, of_matrix: bool) -> Kernel:
    if "Embedding" in name:
        return "bag" if "Bag" in name else "lookup"
    return "accurate" if of_matrix or "Norm" in name else "one by one"


def _by_weights(pairs: Iterable[Pair]) -> dict[str, Terms]:
    """Estimates of the terms by the gradient of the module's weight, for backward passes that are not observed.

    The gradient of an output is not observed if the forward pass belongs to the step of another optimizer, as that of
    a GAN's generator does. The weight's gradient sums the same terms, each times an input. With inputs of unit size its
    norm is sqrt(inputs) times that of the sum. So a bias before a norm, whose gradient is mathematically zero, still
    shows: in a generator before BatchNorm, its gradient is 1e-7 of the weight's.
    """
    return {
        key.path.rpartition(".")[0]: Terms(norm=norm_of(pair.baseline.summary) / math.sqrt(inputs), count=shape[0])
        for pair in pairs
        if (key := pair.baseline.key).phase == "grad" and key.path.endswith(".weight") and not key.stage
        and len(shape := pair.baseline.shape) > 1 and shape[0] and (inputs := math.prod(shape[1:]))
    }  # fmt: skip


def summed_rows(pair: Pair, terms: Mapping[str, Terms]) -> float:
    """Number of rows (samples, positions) that are summed for each element of a parameter's gradient, at most.

    The same for outputs and running statistics of BatchNorm, which follow from the batch's mean and variance. 1 for
    other sites, and if the module's gradients are unknown.
    """
    key, shape = pair.baseline.key, pair.baseline.shape
    if key.phase == "forward" or key.slot == "buffer":
        module = terms.get(key.path if key.phase == "forward" else key.path.rpartition(".")[0])
        return max(1.0, module.summed) if module is not None else 1.0
    added = terms.get(key.path.rpartition(".")[0])
    if key.phase != "grad" or key.slot == "norm" or added is None or not shape or not shape[0]:
        return 1.0
    return max(1.0, added.count / shape[0])


def share_of_noise(gradient: Any, shape: Sequence[int], difference: float) -> float:
    """Share of a gradient's elements that are hardly larger than its error, from its profile.

    A part of a gradient may be mathematically zero, e.g. the key's third of a joint query, key and value bias: it holds
    only rounding, and an adaptive optimizer makes full steps of it.

    Args:
        gradient: Its summary.
        shape: Its shape.
        difference: Relative L2 difference that was measured or is expected.

    Returns:
        Between 0 and 1: of 16 groups of rows (of columns for a vector), those that hold nothing larger.
    """
    grid = Shard.whole(tuple(shape)).grid
    rows = shape[0] if len(shape) > 1 else 1
    used, largest = (
        (-(-rows // grid.row_block), gradient["row_largest"])
        if len(shape) > 1
        else (-(-grid.columns // grid.column_block), gradient["column_largest"])
    )
    count = int(gradient["count"])
    if used < 2 or not count:
        return 0.0
    error = NOISE_SIZE * difference * norm_of(gradient) / math.sqrt(count)
    return float(np.count_nonzero(largest[:used] <= error)) / used


FEW_TURNED = 3.0
"""Elements of a gradient that may turn around if its smallest one lies within its own error."""


def turned_share(gradient: Pair, difference: float) -> float:
    """Share of a gradient's elements that may have either sign, so that an adaptive update makes full steps of both.

    The profile shows groups of noise. Single elements near zero are known by the smallest one: if it lies within its
    error, or if other elements are zero in the two runs, a few may turn around. None does if no bit differs.

    Args:
        gradient: Of both runs.
        difference: Relative L2 difference that was measured or is expected.
    """
    sides = (gradient.baseline.summary, gradient.candidate.summary)
    share = share_of_noise(sides[0], gradient.baseline.shape, difference)
    count, size = int(sides[0]["count"]), norm_of(sides[0])
    if not count or not size or equal_bits(gradient):
        return share
    error = NOISE_SIZE * difference * size / math.sqrt(count)
    near_zero = min(float(one["smallest"]) for one in sides) <= error
    return max(share, FEW_TURNED / count) if near_zero or sides[0]["zero"] != sides[1]["zero"] else share


def _piled_up(pair: Pair, added: Terms) -> float:
    """Largest element of a sum in units of its terms' root mean square, in the run where it is larger."""
    if pair.baseline.key.phase != "grad" or not added.count:
        return 0.0
    terms = added.norm / math.sqrt(added.count)
    most = max(float(largest(one.summary)) for one in (pair.baseline, pair.candidate))
    return most / terms if terms else 0.0


def _lost_addends(piled: float, dtype: str) -> float:
    """Share of a sum that a kernel may lose which adds its terms one by one in a short dtype of unit roundoff u.

    A term that is smaller than u times what was added up so far is rounded away. So a sum of n terms of one sign stops
    to grow at about 1 / u of them. Measured with torch on the CPU in bfloat16 (LayerNorm's weight and bias, Embedding,
    EmbeddingBag), r being the sum over u times a term: at most 0.09 is lost at r = 0.5, 0.13 at 1.5, 0.28 at 2.5, 0.6
    at 6, and 0.9 at 22. r / (r + 3) is more than each.

    Args:
        piled: The sum, in units of a term.
        dtype: The dtype.
    """
    u = UNIT_ROUNDOFF.get(dtype, 0.0)
    return piled * u / (piled * u + 3.0) if u > UNIT_ROUNDOFF["float32"] and math.isfinite(piled) else 0.0


def _in_one_direction(piled: float, terms: float, dtype: str) -> float:
    """Share of a sum by which equal terms may round it: each addition in the same direction.

    The sum of n equal terms is rounded n times, by up to u times what was added up so far: by n u / 2 in all. Kernels
    that add in several lanes lose less. The gradient of a bias under an L1 loss is such a sum: with oneDNN, a third
    of this was measured.

    Args:
        piled: The sum, in units of a term's size.
        terms: The number of terms.
        dtype: The dtype of the gradient; shorter ones than float32 are added up in float32.
    """
    if piled <= _ONE_SIGN * terms or not math.isfinite(piled):
        return 0.0
    return 0.5 * piled * UNIT_ROUNDOFF["float64" if dtype == "float64" else "float32"]


def gradient_floor(pair: Pair, terms: Mapping[str, Terms], floors: Floors, *, accumulated: int) -> float:
    """Floor of a parameter's gradient; gradients with one axis (biases, norms) are sums over all rows.

    A row of an embedding's gradient is a sum over the places where it was looked up.

    Args:
        pair: The gradients; or updates, if the gradients were not observed. Then it is not known how much was canceled.
        terms: By path of the module.
        floors: Of the step.
        accumulated: Micro-batches of the run that has more of them.
    """
    baseline = pair.baseline
    added = terms.get(baseline.key.path.rpartition(".")[0])
    looks_up = added is not None and added.kernel in ("lookup", "bag") and len(baseline.shape) == 2
    if added is None or not baseline.shape or not baseline.shape[-1] or not (looks_up or len(baseline.shape) == 1):
        return floors.gradient(1.0, dtype=baseline.dtype, accumulated=accumulated)
    size = norm_of(baseline.summary) if baseline.key.phase == "grad" else added.norm
    dtype = shorter(baseline.dtype, pair.candidate.dtype, added.dtype)
    rows = max(1.0, added.count / baseline.shape[-1])
    all_piled = _piled_up(pair, added)
    piled = 0.0 if added.kernel == "accurate" else all_piled
    if looks_up:  # a row may be looked up often, or never; a bag has several
        most = (0.5 / UNIT_ROUNDOFF[dtype]) ** 2 if added.kernel == "bag" and dtype in UNIT_ROUNDOFF else rows
        rows = max(1.0, min(piled * piled, most))
        floor = floors.gradient(1.0, dtype=dtype, terms=rows, accumulated=accumulated)
        return max(floor, _lost_addends(piled, dtype))
    floor = floors.gradient(added.norm / size if size else 1.0, dtype=dtype, terms=rows, accumulated=accumulated)
    floor += _lost_addends(piled, dtype) + _in_one_direction(all_piled, rows, dtype)
    # Terms may add up to exactly zero in one of the runs.
    return floor if size or norm_of(pair.candidate.summary) > floor * added.norm else math.inf
