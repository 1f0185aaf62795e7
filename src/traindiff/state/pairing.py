"""Which tensor of one side is which of the other: by name, then by contents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

from traindiff.core.site import canonical_path
from traindiff.state.comparison import common_numbers, numbers, skeleton
from traindiff.state.measured import Measured, common_dtype
from traindiff.state.stored import StoredTensor

_MOST_PREFIX = 3


def under_plain_names(
    baseline: Mapping[str, StoredTensor], candidate: Mapping[str, StoredTensor]
) -> tuple[dict[str, str], dict[str, str], str]:
    """Names to pair by, by the names that each side has, and a note on a prefix that was left out.

    Components that wrappers insert (`module.`, `_orig_mod.`) are left out where names stay distinct. Where most names
    of one side begin with components that the other side's lack (`model.`), and more names agree without them, these
    are left out, too.
    """
    first, second = _canonical(baseline), _canonical(candidate)
    best, chosen = _agreeing(first, second), ("", "")
    for side, names in (("baseline", first), ("candidate", second)):
        for prefix in _prefixes(names.values()):
            shorter = {name: path.removeprefix(prefix) for name, path in names.items()}
            if len(set(shorter.values())) < len(shorter):
                continue
            found = _agreeing(shorter, second) if side == "baseline" else _agreeing(first, shorter)
            if found > best:
                best, chosen = found, (side, prefix)
    side, prefix = chosen
    if not prefix:
        return first, second, ""
    note = f'Names of the {side} begin with "{prefix}", those of the other do not; they are paired without it.'
    if side == "baseline":
        return {name: path.removeprefix(prefix) for name, path in first.items()}, second, note
    return first, {name: path.removeprefix(prefix) for name, path in second.items()}, note


def _canonical(tensors: Iterable[str]) -> dict[str, str]:
    names = list(tensors)
    found = {name: canonical_path(name) for name in names}
    return found if len(set(found.values())) == len(names) else {name: name for name in names}


def _prefixes(paths: Iterable[str]) -> Iterator[str]:
    """Leading components that most paths share."""
    counts: dict[str, int] = {}
    total = 0
    for path in paths:
        total += 1
        parts = path.split(".")
        for length in range(1, min(_MOST_PREFIX, len(parts) - 1) + 1):
            prefix = ".".join(parts[:length]) + "."
            counts[prefix] = counts.get(prefix, 0) + 1
    yield from (prefix for prefix, count in counts.items() if 2 * count > total)


def _agreeing(baseline: Mapping[str, str], candidate: Mapping[str, str]) -> int:
    return len({*baseline.values()} & {*candidate.values()})


Key = tuple[str, tuple[int, ...], int, int]
"""Dtype, shape, fingerprint, multiset: equal for tensors with the same bits."""


def content_keys(one: Measured) -> list[Key]:
    """The keys of a tensor, in its own dtype and in shorter ones."""
    return [
        (dtype, one.tensor.shape, int(summary["fingerprint"]), int(summary["multiset"]))
        for dtype, summary in one.summaries.items()
    ]


def by_content(tensors: Mapping[str, Measured]) -> dict[Key, list[str]]:
    """Names by contents. Tensors whose elements are all one number are left out: they could be any."""
    found: dict[Key, list[str]] = {}
    for name, one in tensors.items():
        if one.summaries and not one.is_constant:
            for key in content_keys(one):
                found.setdefault(key, []).append(name)
    return found


def likest(name: str, others: Sequence[str], layer: tuple[int, ...] | None = None) -> str:
    """The name that is most like another one: the same numbers (or those of a layer), then the same last component."""
    own, last = layer or numbers(name), name.rpartition(".")[2]
    return min(others, key=lambda other: (numbers(other) != own, other.rpartition(".")[2] != last))


def multiset_in(one: Measured, dtype: str) -> tuple[int, int] | None:
    """Multiset fingerprint and number of elements in a dtype; None if it is not known."""
    summary: Any = one.summaries.get(dtype)
    return None if summary is None else (int(summary["multiset"]), one.tensor.size)


def rearranged(baseline: Measured, candidate: Measured) -> str | None:
    """The dtype in which two tensors have the same numbers in any order; None if they have not."""
    dtype = common_dtype(baseline.tensor.dtype, candidate.tensor.dtype)
    if dtype is None or baseline.is_constant or candidate.is_constant:
        return None
    first, second = multiset_in(baseline, dtype), multiset_in(candidate, dtype)
    return dtype if first is not None and first == second else None


def in_one_order(baseline: Measured, candidate: Measured, dtype: str) -> bool:
    """True if two tensors with the same numbers in a dtype have them in the same order, whatever their shapes are."""
    first, second = baseline.summaries[dtype], candidate.summaries[dtype]
    return int(first["fingerprint"]) == int(second["fingerprint"])


_MODULUS = 1 << 64


Groups = list[list[str]]
"""Names of the parts of a whole: for each part, those that are stacked to make it."""

_MOST_IN_LAYER = 64
"""Tensors of one layer of which three may be one; of more, two."""

_MOST_IN_PAIRS = 1 << 12
"""Tensors of one layer of which two may be one; of more, none."""


class Sums:
    """Which tensors together have the numbers of a whole: two or three of a layer, or families of its experts.

    Args:
        parts: Tensors of one side that have no partner.
    """

    def __init__(self, parts: Mapping[str, Measured]) -> None:
        layers: dict[tuple[int, ...], tuple[Groups, Groups]] = {}
        for name in parts:
            layers.setdefault(numbers(name), ([], []))[0].append([name])
        for family in families(parts):
            layers.setdefault(common_numbers(family), ([], []))[1].append(family)
        self._found: dict[tuple[str, int, int], list[tuple[tuple[int, ...], Groups]]] = {}
        self._pairs: list[tuple[tuple[int, ...], _Pairs]] = []
        for layer, (near, stacks) in layers.items():
            for groups, least in ((near, 2), (stacks, 1)):
                is_small = len(groups) <= _MOST_IN_LAYER
                for chosen in chain.from_iterable(
                    combinations(groups, count) for count in range(least, 4 if is_small else 2)
                ):
                    held = [parts[name] for group in chosen for name in group]
                    for dtype, total, size in _sums(held):
                        self._found.setdefault((dtype, total, size), []).append((layer, list(chosen)))
                if not is_small and len(groups) <= _MOST_IN_PAIRS:
                    self._pairs.append((layer, _Pairs(groups, parts)))

    def of(self, whole: Measured, left: Collection[str], *, in_any_layer: bool) -> tuple[Groups, str] | None:
        """Parts whose numbers together are those of a whole, and the dtype in which they are; None if there are none.

        Args:
            whole: A tensor of the other side.
            left: Names of the parts that have still no partner.
            in_any_layer: Whether the parts may be of another layer than the whole.
        """
        if whole.is_constant:
            return None
        own = numbers(whole.tensor.name)
        for dtype, summary in whole.summaries.items():
            total, size = int(summary["multiset"]), whole.tensor.size
            for layer, groups in self._found.get((dtype, total, size), ()):
                if (in_any_layer or layer == own) and _are_left(groups, left):
                    return groups, dtype
            for layer, pairs in self._pairs:
                if (in_any_layer or layer == own) and (groups := pairs.of(dtype, total, size, left)):
                    return groups, dtype
        return None


class _Pairs:
    """Which two of many groups of parts have the numbers of a whole, without a list of all pairs.

    Args:
        groups: The groups.
        parts: The tensors.
    """

    def __init__(self, groups: Groups, parts: Mapping[str, Measured]) -> None:
        self._groups = groups
        self._sums: dict[str, list[tuple[int, int, int]]] = {}
        self._numbers: dict[tuple[str, int, int], list[int]] = {}
        self._sizes: dict[str, set[int]] = {}
        for number, group in enumerate(groups):
            for dtype, total, size in _sums([parts[name] for name in group]):
                self._sums.setdefault(dtype, []).append((number, total, size))
                self._numbers.setdefault((dtype, total, size), []).append(number)
                self._sizes.setdefault(dtype, set()).add(size)

    def of(self, dtype: str, total: int, size: int, left: Collection[str]) -> Groups:
        """The first pair whose parts have still no partner; nothing if there is none."""
        sizes = self._sizes.get(dtype, set())
        if not any(size - one in sizes for one in sizes):
            return []
        for number, own, own_size in self._sums[dtype]:
            for other in self._numbers.get((dtype, (total - own) % _MODULUS, size - own_size), ()):
                pair = [self._groups[number], self._groups[other]]
                if other > number and _are_left(pair, left):
                    return pair
        return []


def _sums(parts: Sequence[Measured]) -> Iterator[tuple[str, int, int]]:
    """The multiset fingerprint of parts together, and their size, in each dtype that all have."""
    size = sum(one.tensor.size for one in parts)
    for dtype in parts[0].summaries:
        if all(dtype in one.summaries for one in parts):
            yield dtype, sum(int(one.summaries[dtype]["multiset"]) for one in parts) % _MODULUS, size


def _are_left(groups: Groups, left: Collection[str]) -> bool:
    return all(name in left for group in groups for name in group)


def families(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in one number, which counts from 0 on without gaps; in its order."""
    by_rest: dict[tuple[str, int, tuple[int, ...]], dict[int, str]] = {}
    for name in names:
        own = numbers(name)
        for position in range(len(own)):
            rest = (*own[:position], *own[position + 1 :])
            by_rest.setdefault((skeleton(name), position, rest), {})[own[position]] = name
    return [
        [members[number] for number in range(len(members))]
        for members in by_rest.values()
        if len(members) > 1 and all(number in members for number in range(len(members)))
    ]
