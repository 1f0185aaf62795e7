"""How two tensors that belong together differ: in their places, by a shard, in shape, or in numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from traindiff.core.maps.entries import Layout
from traindiff.core.summary import UNIT_ROUNDOFF, distance, is_finite, norm_of
from traindiff.state.arrangements import (
    KnownHashes,
    Lines,
    layout_of,
    layout_text,
    matrix_shape,
    moved_rows,
    padded,
    repeated_rows,
)
from traindiff.state.comparison import Word
from traindiff.state.elements import element_difference
from traindiff.state.maps import joined
from traindiff.state.measured import Measured, common_dtype, measure
from traindiff.state.pairing import in_one_order, rearranged

_SMALL = 1 << 16
"""Elements of a tensor whose rows may be hashed without a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What a relation says of two tensors that have other bits.

    Attributes:
        word: `equivalent`, `differs` or `only`.
        kind: What the difference looks like.
        message: A clause of which the candidate's tensor is the subject.
        evidence: Numbers, by name.
        layout: How the baseline's tensor becomes the candidate's; None if that is not known.
    """

    word: Word
    kind: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    layout: Layout | None = None


def difference(baseline: Measured, candidate: Measured, hashes: KnownHashes) -> Difference:
    """How a tensor of the candidate differs from the one of the baseline that it belongs to.

    Raises:
        CheckpointError: A file has ended.
    """
    if candidate.is_zero != baseline.is_zero:
        message = "is zero in all elements; the baseline's is not"
        if baseline.is_zero:
            message = "has numbers; the baseline's is zero in all elements"
        return Difference(word="differs", kind="zero", message=message)
    if not (baseline.tensor.is_readable and candidate.tensor.is_readable):
        return _by_summary(baseline, candidate, hashes)
    dtype = common_dtype(baseline.tensor.dtype, candidate.tensor.dtype)
    same_shape = baseline.tensor.shape == candidate.tensor.shape
    if dtype is not None and rearranged(baseline, candidate):
        message, layout = arranged(baseline, candidate, dtype, hashes)
        if message:
            word: Word = "differs" if same_shape else "equivalent"
            return Difference(word=word, kind="rearranged", message=message, layout=layout)
    if not same_shape:
        return _other_shape(baseline, candidate, dtype, hashes)
    kind, clause = _shards(baseline, candidate, dtype, hashes)
    if kind:
        return Difference(word="differs", kind=kind, message=clause)
    found = element_difference(baseline.tensor, candidate.tensor)
    return Difference(
        word="equivalent" if found.kind in ("bits", "cast", "through") else "differs",
        kind=found.kind, message=found.message, evidence=found.evidence,
    )  # fmt: skip


def put_together(
    baseline: Sequence[Measured], candidate: Sequence[Measured], layout: Layout | None
) -> tuple[Measured, Measured] | None:
    """Both sides as one tensor each, with summaries; None if they do not fit, or only summaries are known."""
    made = [one[0] for one in (baseline, candidate)]
    if layout is None:
        return made[0], made[1]
    side = 0 if len(candidate) == 1 else 1
    parts, whole = (baseline, candidate[0]) if side == 0 else (candidate, baseline[0])
    if len(parts) != len(layout.order) or not all(one.tensor.is_readable for one in (*parts, whole)):
        return None
    tensor = joined([parts[number].tensor for number in layout.order], whole.tensor, layout)
    if tensor is None:
        return None
    dtypes = [one.tensor.dtype for one in made if common_dtype(one.tensor.dtype, tensor.dtype) == one.tensor.dtype]
    (made[side],) = measure([(tensor, [dtype for dtype in dtypes if dtype != tensor.dtype])])
    return made[0], made[1]


def rounded_to(dtype: str, *tensors: Measured) -> str:
    """A clause on the dtype to which some of these tensors were rounded; empty if all have it."""
    return f", rounded to {dtype}" if any(one.tensor.dtype != dtype for one in tensors) else ""


def arranged(baseline: Measured, candidate: Measured, dtype: str, hashes: KnownHashes) -> tuple[str, Layout | None]:
    """A clause on tensors with the same numbers in other places, and their layout if it is a known one."""
    short = rounded_to(dtype, baseline, candidate)
    shapes = [list(one.tensor.shape) for one in (baseline, candidate)]
    if shapes[0] != shapes[1] and in_one_order(baseline, candidate, dtype):
        return f"is the baseline's {baseline.tensor.name} in the shape {shapes[1]} (there {shapes[0]}){short}", None
    first, second = hashes.of(baseline.tensor, dtype), hashes.of(candidate.tensor, dtype)
    layout = layout_of([Lines(first.rows)], second)
    if layout is not None:
        if layout.transpose and not any(layout.heads):
            return f"is the baseline's {baseline.tensor.name}, transposed{short}", layout
        return f"is the baseline's {layout_text(layout, [baseline.tensor.name])}{short}", layout
    for place, what in ((0, "rows"), (1, "columns")):
        if (clause := moved_rows(first[place], second[place])) and (place == 0 or len(first[1]) > 1):
            return f"is the baseline's {baseline.tensor.name}{short}, of which {clause.format(what)}", None
    return "", None


def _shards(baseline: Measured, candidate: Measured, dtype: str | None, hashes: KnownHashes) -> tuple[str, str]:
    """A kind and a clause on rows or columns that are there twice, or missing; empty if none are."""
    if dtype is None or not _is_partly_same(baseline, candidate, dtype):
        return "", ""
    first, second = hashes.of(baseline.tensor, dtype), hashes.of(candidate.tensor, dtype)
    is_matrix = len(baseline.tensor.shape) > 1
    for place, what in ((0, "rows"), (1, "columns")) if is_matrix else ((0, "elements"),):
        kind, clause = repeated_rows(first[place], second[place])
        of_zeros = int(candidate.own["zero"]) <= int(baseline.own["zero"])  # they were zeros of the other sign
        if kind and not (kind == "missing-shard" and of_zeros):
            return kind, clause.format(what)
    return "", ""


def _other_shape(baseline: Measured, candidate: Measured, dtype: str | None, hashes: KnownHashes) -> Difference:
    shapes = (baseline.tensor.shape, candidate.tensor.shape)
    rows = [matrix_shape(shape) for shape in shapes]
    evidence = {"shapes": [list(shape) for shape in shapes]}
    if dtype is not None and rows[0][1] == rows[1][1] and len(shapes[0]) == len(shapes[1]) == 2:
        first, second = hashes.of(baseline.tensor, dtype)[0], hashes.of(candidate.tensor, dtype)[0]
        if padded(first, second):
            more = abs(len(first) - len(second))
            longer = second if len(second) > len(first) else first
            zeros = not longer[-more:].any()
            verb = "has" if len(second) > len(first) else "lacks"
            what = f"{more} rows at the end, which are {'zero' if zeros else 'not zero'}"
            others = f"all {min(len(first), len(second))} other rows are the baseline's"
            message = f"{verb} {what}; {others}{rounded_to(dtype, baseline, candidate)}"
            return Difference(word="equivalent" if zeros else "only", kind="padded", message=message, evidence=evidence)
    message = f"has the shape {list(shapes[1])}; the baseline's is {list(shapes[0])}"
    return Difference(word="differs", kind="shape", message=message, evidence=evidence)


def _by_summary(baseline: Measured, candidate: Measured, hashes: KnownHashes) -> Difference:
    """How two tensors differ, as far as summaries tell."""
    first, second = baseline.own, candidate.own
    if baseline.tensor.shape != candidate.tensor.shape:
        return _other_shape(baseline, candidate, None, hashes)
    if baseline.is_zero and candidate.is_zero:
        message = "has the same numbers in other bits: zeros of the other sign, from summaries"
        return Difference(word="equivalent", kind="bits", message=message)
    size, apart = norm_of(first), float(distance(first, second))
    relative = apart / size if size else float("inf")
    dtypes = (baseline.tensor.dtype, candidate.tensor.dtype)
    u = max(UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes)
    known = relative if math.isfinite(relative) and math.isfinite(size) else None
    evidence = {"relative": known}
    if not (is_finite(first) and is_finite(second)):
        message = (
            "differs, or may differ where one of the two has NaN or infinity, of which summaries only have the number"
        )
        return Difference(word="differs", kind="other", message=message, evidence=evidence)
    if known is None:
        message = "differs; its summary and the baseline's do not tell by how much"
        return Difference(word="differs", kind="other", message=message, evidence=evidence)
    if dtypes[0] != dtypes[1] and known <= u:
        what = f"is {dtypes[1]} and the baseline's {dtypes[0]}"
        message = f"{what}: by their summaries, they differ by no more than a rounding"
        return Difference(word="equivalent", kind="cast", message=message, evidence=evidence)
    message = f"differs: relative L2 difference about {known:.2g}, from summaries"
    return Difference(word="differs", kind="other", message=message, evidence=evidence)


def _is_partly_same(baseline: Measured, candidate: Measured, dtype: str) -> bool:
    """True if a block of rows, or of columns, may be the same in both: one of the sums of squares of the profiles is.

    A shard that is missing or there twice leaves the others as they are. Small tensors are always looked at.
    """
    if baseline.tensor.size < _SMALL:
        return True
    first, second = baseline.summaries[dtype], candidate.summaries[dtype]
    return any(
        bool((np.isclose(first[name], second[name], rtol=1e-9, atol=0.0) & (first[name] > 0)).any())
        for name in ("row_squares", "column_squares")
    )
