"""LoRA adapters (Hu et al., 2021): is a weight of one side `W + s B A` of the other side's?"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.site import canonical_path
from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.state.comparison import Relation
from traindiff.state.dtypes import decoded, is_float
from traindiff.state.elements import shown_number
from traindiff.state.stored import StoredTensor

_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.[^.]+)?\.weight")
"""A factor, as PEFT names it in its files and in a model, which adds the adapter's name."""

_PREFIX = "base_model.model."

Tensors = dict[str, StoredTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The factors of an adapter.

    Attributes:
        down: A, of shape [rank, inputs].
        up: B, of shape [outputs, rank].
    """

    down: StoredTensor
    up: StoredTensor


def without_adapters(tensors: Mapping[str, StoredTensor]) -> tuple[Tensors, dict[str, Adapter]]:
    """Tensors under their names without PEFT, and the adapters by the name of the weight that they change."""
    factors: dict[str, dict[str, StoredTensor]] = {}
    rest: Tensors = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match and len(tensor.shape) == 2 and is_float(tensor.dtype) and tensor.is_readable:
            weight = f"{_plain(match[1])}.weight"
            factors.setdefault(weight, {})[match[2]] = tensor
        else:
            rest[name] = tensor
    found = {
        weight: Adapter(down=pair["A"], up=pair["B"])
        for weight, pair in factors.items()
        if len(pair) == 2 and pair["A"].shape[0] == pair["B"].shape[1]
    }
    if not found:
        return dict(tensors), {}
    return {_plain(name): tensor for name, tensor in rest.items()}, found


def _plain(name: str) -> str:
    return canonical_path(name).removeprefix(_PREFIX).replace(".base_layer.", ".")


def merged_adapters(
    baseline: Mapping[str, StoredTensor], candidate: Mapping[str, StoredTensor], base: Mapping[str, StoredTensor]
) -> tuple[Tensors, Tensors, list[Relation]]:
    """Both sides without what adapters explain, and a relation for each adapted weight.

    Nothing is done where both sides have adapters, or none has.

    Args:
        baseline: Parameters of one side.
        candidate: Parameters of the other side.
        base: Parameters without adapters, for a side that holds adapters alone.

    Raises:
        CheckpointError: A file has ended.
    """
    first, of_first = without_adapters(baseline)
    second, of_second = without_adapters(candidate)
    if bool(of_first) == bool(of_second):
        return dict(baseline), dict(candidate), []
    adapters = of_first or of_second
    own = first if of_first else second
    other = {canonical_path(name): one for name, one in (second if of_first else first).items()}
    if not any(weight in own for weight in adapters):
        own = {**base, **own}
    relations = []
    for weight, adapter in adapters.items():
        if weight not in own or weight not in other:
            continue
        plain, changed = own.pop(weight), other.pop(weight)
        names = (plain.name, adapter.down.name, adapter.up.name)
        relation = _relation(plain, changed, adapter)
        sides = (names, (changed.name,)) if of_first else ((changed.name,), names)
        relations.append(replace(relation, baseline=sides[0], candidate=sides[1]))
    return (own, other, relations) if of_first else (other, own, relations)


def _relation(plain: StoredTensor, changed: StoredTensor, adapter: Adapter) -> Relation:
    """Whether the changed weight is the plain one plus a multiple of the adapter's product."""
    shape = (adapter.up.shape[0], adapter.down.shape[1])
    if plain.shape != shape or changed.shape != shape or not all(map(_is_readable, (plain, changed))):
        return _made("differs", "shape", f"and its adapter of shape {list(shape)} do not fit together", {})
    down, up = _values(adapter.down), _values(adapter.up)
    apart = product = delta = size = 0.0
    for first, end in plain.slabs:
        added = up[first:end] @ down
        old = decoded(plain.slab(first, end), plain.dtype).astype(np.float64).reshape(added.shape)
        new = decoded(changed.slab(first, end), changed.dtype).astype(np.float64).reshape(added.shape)
        moved = new - old
        apart += float(np.square(moved).sum())
        product += float((moved * added).sum())
        delta += float(np.square(added).sum())
        size += float(np.square(new).sum())
    u = max(UNIT_ROUNDOFF[plain.dtype], UNIT_ROUNDOFF[changed.dtype])
    if not all(map(math.isfinite, (apart, product, delta, size))):
        return _made("differs", "other", "is not finite, or its adapter is not", {})
    if not delta:
        fits = apart <= (2 * u) ** 2 * size
        message = "has an adapter that changes nothing: B A is zero"
        return _made("equivalent" if fits else "differs", "merged" if fits else "other", message, {"scale": None})
    scale = product / delta
    left = math.sqrt(max(0.0, apart - scale * product))
    allowed = 2 * u * (math.sqrt(size) + abs(scale) * math.sqrt(delta))
    error = u * math.sqrt(size / delta / max(1, plain.size))  # of the scale, by rounding of independent elements
    evidence: dict[str, Any] = {"scale": scale, "left": left / math.sqrt(size) if size else None}
    if left > allowed:
        rest = f"a relative L2 difference of {left / math.sqrt(size):.2g} is left with s = {scale:.4g}"
        message = f"is neither W nor W + s B A: {rest}"
        return _made("differs", "other", message, evidence)
    if abs(scale) <= 6 * error:
        if error > _LARGEST_ERROR:
            message = "is the weight up to rounding, which hides whether the adapter is merged: B A is too small"
            return _made("equivalent", "cast", message, evidence)
        return _made("differs", "not-merged", "is still W: the adapter is not merged", evidence)
    shown = shown_number(scale, 3 * error / abs(scale))
    return _made("equivalent", "merged", f"is W + s B A with s = {shown}", evidence)


_LARGEST_ERROR = 0.05
"""Where rounding leaves the scale less certain than this, an adapter that is not seen may still be there."""


def _made(word: Any, kind: str, message: str, evidence: Mapping[str, Any]) -> Relation:
    return Relation(
        word=word, kind=kind, role="parameter", baseline=(), candidate=(), message=message, evidence=evidence
    )


def _is_readable(tensor: StoredTensor) -> bool:
    return tensor.is_readable and is_float(tensor.dtype)


def _values(tensor: StoredTensor) -> NDArray[np.float64]:
    bits = tensor.slab(0, tensor.rows)
    return np.asarray(decoded(bits, tensor.dtype), dtype=np.float64).reshape(tensor.shape)
