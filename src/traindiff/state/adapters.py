"""LoRA adapters (Hu et al., 2021): is a weight of one side `W + s B A` of the other side's?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traindiff.core.site import canonical_path
from traindiff.core.summary import UNIT_ROUNDOFF
from traindiff.state.comparison import Relation
from traindiff.state.dtypes import decoded, is_float, shorter
from traindiff.state.elements import shown_number
from traindiff.state.stored import StoredTensor

_FACTOR = re.compile(r"(.+)\.lora_([AB])(?:\.([^.]+))?\.weight")
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
    """Tensors under their names without PEFT, and the adapters by the name of the weight that they change.

    Factors without a partner that fits stay among the tensors, as do those of a second adapter of a weight.
    """
    factors: dict[tuple[str, str], dict[str, str]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match and len(tensor.shape) == 2 and is_float(tensor.dtype) and tensor.is_readable:
            factors.setdefault((f"{_plain(match[1])}.weight", match[3] or ""), {}).setdefault(match[2], name)
    found: dict[str, Adapter] = {}
    used: set[str] = set()
    for (weight, _), pair in factors.items():
        if len(pair) < 2 or weight in found:
            continue
        down, up = tensors[pair["A"]], tensors[pair["B"]]
        if down.shape[0] == up.shape[1]:
            found[weight] = Adapter(down=down, up=up)
            used.update(pair.values())
    if not found:
        return dict(tensors), {}
    return _renamed({name: tensor for name, tensor in tensors.items() if name not in used}, _plain), found


def _plain(name: str) -> str:
    return canonical_path(name).removeprefix(_PREFIX).replace(".base_layer.", ".")


def _renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    """Tensors by other names; by their own where another tensor has the other one."""
    made: Tensors = {}
    kept = {name for name in tensors if rename(name) == name}
    for name, tensor in tensors.items():
        other = rename(name)
        made[name if other in made or (other != name and other in kept) else other] = tensor
    return made


Scale = Callable[[str, int], float | None]


def merged_adapters(
    baseline: Mapping[str, StoredTensor],
    candidate: Mapping[str, StoredTensor],
    base: Mapping[str, StoredTensor],
    scales: tuple[Scale | None, Scale | None] = (None, None),
) -> tuple[Tensors, Tensors, list[Relation]]:
    """Both sides without what adapters explain, and a relation for each adapted weight.

    Nothing is done where both sides have adapters, or none has.

    Args:
        baseline: Parameters of one side.
        candidate: Parameters of the other side.
        base: Parameters without adapters, for a side that holds adapters alone.
        scales: For each side: the factor that its configuration of adapters says, by the name of a weight and the
            adapter's rank; None without one.

    Raises:
        CheckpointError: A file has ended.
    """
    first, of_first = without_adapters(baseline)
    second, of_second = without_adapters(candidate)
    if bool(of_first) == bool(of_second):
        return dict(baseline), dict(candidate), []
    adapters, scale_of = (of_first, scales[0]) if of_first else (of_second, scales[1])
    own = first if of_first else second
    other = _renamed(second if of_first else first, canonical_path)
    if not any(weight in own for weight in adapters):
        own = {**base, **own}
    relations = []
    ranks = []
    for weight, adapter in adapters.items():
        if weight not in own or weight not in other:
            own |= _renamed({factor.name: factor for factor in (adapter.down, adapter.up)}, _plain)
            continue
        plain, changed = own.pop(weight), other.pop(weight)
        names = (plain.name, adapter.down.name, adapter.up.name)
        rank = adapter.down.shape[0]
        ranks.append(rank)
        said = None if scale_of is None else scale_of(weight, rank)
        relation = _relation(plain, changed, adapter, said)
        sides = (names, (changed.name,)) if of_first else ((changed.name,), names)
        if not of_first and relation.message.startswith("is "):
            relation = replace(relation, message=f"is W; the baseline's {relation.message}")
        relations.append(replace(relation, baseline=sides[0], candidate=sides[1]))
    if scale_of is None:
        relations = _with_one_factor(relations, ranks)
    return (own, other, relations) if of_first else (other, own, relations)


def _with_one_factor(relations: list[Relation], ranks: list[int]) -> list[Relation]:
    """The relations, of which those that are merged with another factor than most differ.

    A training has one number alpha, and the factor is alpha, alpha / rank or alpha / sqrt(rank).
    """
    merged = [number for number, one in enumerate(relations) if one.kind == "merged" and one.evidence.get("scale")]
    if len(merged) < 3:
        return relations
    best: list[int] = []
    for power in (1.0, 0.5, 0.0):
        alphas = {number: relations[number].evidence["scale"] * ranks[number] ** power for number in merged}
        middle = sorted(alphas.values())[len(alphas) // 2]
        alike = [
            number
            for number, alpha in alphas.items()
            if abs(alpha - middle) <= (3 * relations[number].evidence["error"] + 1e-6) * abs(middle)
        ]
        best = max(best, alike, key=len)
    if 2 * len(best) <= len(merged):
        return relations
    found = list(relations)
    for number in [number for number in merged if number not in best]:
        one = relations[number]
        usual = shown_number(relations[best[0]].evidence["scale"], 3 * relations[best[0]].evidence["error"])
        message = f"{one.message}; it is {usual} in most others"
        found[number] = replace(one, word="differs", kind="factor", message=message)
    return found


def _relation(plain: StoredTensor, changed: StoredTensor, adapter: Adapter, said: float | None) -> Relation:
    """Whether the changed weight is the plain one plus a multiple of the adapter's product.

    Weights of transformers' Conv1D are transposed: there it is that of the transposed product.
    """
    shape = (adapter.up.shape[0], adapter.down.shape[1])
    fits = [transposed for transposed in (False, True) if plain.shape == (shape[::-1] if transposed else shape)]
    if not fits or changed.shape != plain.shape or not all(map(_is_readable, (plain, changed))):
        return _made("differs", "shape", f"and its adapter of shape {list(shape)} do not fit together", {})
    down, up = _values(adapter.down), _values(adapter.up)
    products = [_Product(plain, changed, *((down.T, up.T) if transposed else (up, down))) for transposed in fits]
    return min(products, key=lambda one: one.left).relation(said)


class _Product:
    """What is left of the change of a weight after taking out a multiple of the product of two factors.

    Args:
        plain: The weight.
        changed: The weight that is said to be changed by the product.
        rows: The first factor.
        columns: The second factor.

    Raises:
        CheckpointError: A file has ended.
    """

    def __init__(
        self, plain: StoredTensor, changed: StoredTensor, rows: NDArray[np.float64], columns: NDArray[np.float64]
    ) -> None:
        self._count = plain.size
        self._cast = f", rounded to {changed.dtype}" if changed.dtype in shorter(plain.dtype) else ""
        self._u = max(UNIT_ROUNDOFF[plain.dtype], UNIT_ROUNDOFF[changed.dtype])
        self._apart = self._delta = self._size = product = 0.0
        for first, end in plain.slabs:
            added = rows[first:end] @ columns
            old = decoded(plain.slab(first, end), plain.dtype).astype(np.float64).reshape(added.shape)
            new = decoded(changed.slab(first, end), changed.dtype).astype(np.float64).reshape(added.shape)
            moved = new - old
            self._apart += float(np.square(moved).sum())
            product += float((moved * added).sum())
            self._delta += float(np.square(added).sum())
            self._size += float(np.square(new).sum())
        self._is_finite = all(map(math.isfinite, (self._apart, product, self._delta, self._size)))
        self._scale = product / self._delta if self._delta else 0.0
        self.left = math.sqrt(max(0.0, self._apart - self._scale * product)) if self._is_finite else math.inf

    def relation(self, said: float | None) -> Relation:
        """What that means, if the adapter's configuration says this factor, or none."""
        u, scale, size = self._u, self._scale, math.sqrt(self._size)
        if not self._is_finite:
            return _made("differs", "other", "is not finite, or its adapter is not", {})
        if not self._delta:
            fits = self._apart <= (2 * u * size) ** 2
            message = "has an adapter that changes nothing: B A is zero"
            return _made("equivalent" if fits else "differs", "merged" if fits else "other", message, {"scale": None})
        error = u * math.sqrt(self._size / self._delta / max(1, self._count))  # of roundings of independent elements
        evidence: dict[str, Any] = {"scale": scale, "left": self.left / size if size else None}
        if self.left > 2 * u * (size + abs(scale) * math.sqrt(self._delta)):
            rest = f"a relative L2 difference of {self.left / size:.2g} is left with s = {scale:.4g}"
            return _made("differs", "other", f"is neither W nor W + s B A: {rest}", evidence)
        if abs(scale) <= 6 * error:
            if error > _LARGEST_ERROR:
                message = "is the weight up to rounding, which hides whether the adapter is merged: B A is too small"
                return _made("equivalent", "cast", message, evidence)
            return _made("differs", "not-merged", "is still W: the adapter is not merged", evidence)
        evidence["error"] = error / abs(scale)
        message = f"is W + s B A with s = {shown_number(scale, 3 * error / abs(scale))}{self._cast}"
        if scale < 0:
            return _made("differs", "factor", f"{message}: the adapter is subtracted, not added", evidence)
        if said is not None and abs(scale - said) > 6 * error + 1e-5 * abs(said):
            return _made("differs", "factor", f"{message}; the adapter's configuration says {said:g}", evidence)
        return _made("equivalent", "merged", message, evidence)


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
