"""Find the partner of every tensor, and say how the two differ: cheap and certain answers first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from traindiff.core.maps.entries import Layout
from traindiff.core.summary import UNIT_ROUNDOFF, distance, norm_of
from traindiff.state.arrangements import (
    Hashes,
    hashes,
    layout_of,
    layout_text,
    matrix_shape,
    moved_rows,
    padded,
    repeated_rows,
)
from traindiff.state.comparison import Relation, Word, numbers
from traindiff.state.elements import element_difference
from traindiff.state.equal_bits import Equality
from traindiff.state.layer_order import in_order
from traindiff.state.measured import MOST_THREADS, Measured, common_dtype, same_bits
from traindiff.state.pairing import by_content, content_keys, families, fused_parts, likest, rearranged
from traindiff.state.stored import Role

_SMALL = 1 << 16
"""Elements of a tensor whose rows may be hashed without a reason."""


class Matching:
    """The tensors of one role of both sides.

    Args:
        role: Their role.
        baseline: By the names by which sides are paired.
        candidate: Likewise.
        equal: Names under which both sides have the same bits.
        progress: Is told how many more bytes have been read, and how many more are to be read.
    """

    def __init__(
        self,
        role: Role,
        baseline: Mapping[str, Measured],
        candidate: Mapping[str, Measured],
        equal: Mapping[str, Equality],
        progress: Callable[[int, int], None] = lambda _, __: None,
    ) -> None:
        self._role = role
        self._equal = equal
        self._progress = progress
        self._baseline = baseline
        self._candidate = candidate
        self._left = {name: one for name, one in baseline.items() if name not in candidate}
        self._right = {name: one for name, one in candidate.items() if name not in baseline}
        self._found: dict[str, Relation] = {}  # by name in the candidate; the baseline's own behind a NUL
        self._known_hashes: dict[tuple[int, str], tuple[Hashes, Hashes]] = {}

    def relations(self) -> list[Relation]:
        """A relation for every tensor, in the order of the candidate; those of the baseline alone last.

        Raises:
            CheckpointError: A file has ended.
        """
        unlike = [name for name in self._candidate if name in self._baseline and not self._same(name, name)]
        self._find_renamed()
        self._find_copies()
        self._find_fused()
        self._find_rearranged()
        contents = by_content(self._baseline)
        self._progress(0, sum(self._num_bytes(name) for name in unlike))
        pool = ThreadPoolExecutor(max_workers=min(MOST_THREADS, os.cpu_count() or 1))
        try:
            for name, relation in pool.map(lambda name: (name, self._unlike(name, contents)), unlike):
                self._found[name] = relation
                self._progress(self._num_bytes(name), 0)
        finally:
            pool.shutdown(cancel_futures=True)
        for name in self._right:
            self._found.setdefault(name, self._only(name, of_candidate=True))
        ordered = [self._found[name] for name in self._candidate if name in self._found]
        rest = [self._found.get(f"\0{name}") or self._only(name, of_candidate=False) for name in self._left]
        return [*in_order(ordered, self._baseline), *rest]

    def _num_bytes(self, name: str) -> int:
        """Bytes of two tensors of one name."""
        return self._baseline[name].tensor.num_bytes + self._candidate[name].tensor.num_bytes

    def _relation(
        self, word: Word, kind: str, baseline: list[str], candidate: list[str], message: str, **more: Any
    ) -> Relation:
        return Relation(
            word=word, kind=kind, role=self._role, message=message,
            baseline=tuple(self._baseline[name].tensor.name for name in baseline),
            candidate=tuple(self._candidate[name].tensor.name for name in candidate),
            **more,
        )  # fmt: skip

    def _settle(self, baseline: list[str], candidate: list[str], relation: Relation) -> None:
        """Take tensors without partners of their name out."""
        self._found[candidate[0]] = relation
        for name in baseline:
            self._left.pop(name, None)
        for name in candidate:
            self._right.pop(name, None)

    def _same(self, baseline: str, candidate: str) -> bool:
        """Settle two tensors with the same bits, or rounded to them."""
        first, second = self._baseline[baseline], self._candidate[candidate]
        renamed = baseline != candidate
        known = "unequal" if renamed else self._equal.get(baseline, "unequal")
        if known == "unequal" and not same_bits(first, second):
            return False
        about = f"is the baseline's {first.tensor.name}" if renamed else "is the baseline's"
        own, other = first.tensor.dtype, second.tensor.dtype
        if own == other:
            kind, message = ("renamed", about) if renamed else ("identical", "has the same bits")
            self._settle([baseline], [candidate], self._relation("identical", kind, [baseline], [candidate], message))
            return True
        short = common_dtype(own, other)
        message = f"{about}, rounded to {other}" if short == other else f"{about}, stored as {other} without loss"
        if short == own:
            message = f"{about} after rounding to {own}; the candidate's is {other}"
            if known == "exact" or (known == "unequal" and self._is_exact(second, own)):
                message = f"{about}, stored as {other} with the same numbers"
        exact = {"dtype": short, "rounding": "nearest"}
        self._settle(
            [baseline],
            [candidate],
            self._relation("equivalent", "cast", [baseline], [candidate], message, evidence=exact),
        )
        return True

    @staticmethod
    def _is_exact(one: Measured, dtype: str) -> bool:
        """True if rounding has changed nothing: sums of squares and sums agree to the last digits."""
        own, rounded = one.own, one.summaries[dtype]
        return bool(own["sum"] == rounded["sum"] and own["sum_of_squares"] == rounded["sum_of_squares"])

    def _find_renamed(self) -> None:
        """Pair tensors of other names by their contents."""
        contents = by_content(self._left)
        for name in list(self._right):
            known = [other for key in content_keys(self._right[name]) for other in contents.get(key, ())]
            there = [other for other in known if other in self._left]
            if there:
                self._same(likest(name, there), name)
        self._pair_constants()

    def _pair_constants(self) -> None:
        """Pair tensors that are one number throughout, where as many of each layer are left on both sides."""
        sides: list[dict[tuple[Any, ...], list[str]]] = [{}, {}]
        for names, side in zip(sides, (self._left, self._right), strict=True):
            for name, one in side.items():
                if one.is_constant and one.tensor.size:
                    names.setdefault((numbers(name), one.tensor.shape, float(one.own["minimum"])), []).append(name)
        for key, here in sides[0].items():
            there = sides[1].get(key, [])
            if len(here) == len(there):
                for name in there:
                    other = likest(name, [one for one in here if one in self._left])
                    self._same(other, name)

    def _find_copies(self) -> None:
        """What one side lacks because it is tied there to a tensor that both have."""
        for here, own, whose in (
            (self._right, self._candidate, "candidate"),
            (self._left, self._baseline, "baseline"),
        ):
            contents = by_content({name: one for name, one in own.items() if name not in here})
            for name in list(here):
                known = [other for key in content_keys(here[name])[:1] for other in contents.get(key, ())]
                if not known:
                    continue
                other = own[likest(name, known)].tensor.name
                names: tuple[list[str], list[str]] = ([], [name]) if whose == "candidate" else ([name], [])
                lacking = "baseline" if whose == "candidate" else "candidate"
                message = f"is {other} again: tied in the {lacking}, which has it once"
                key = name if whose == "candidate" else f"\0{name}"
                self._found[key] = self._relation("equivalent", "tied", *names, message)
                if whose == "candidate":
                    here.pop(name)

    def _find_fused(self) -> None:
        """What is one tensor on one side, and several on the other."""
        for whole_side, part_side, of_candidate in (
            (self._right, self._left, True),
            (self._left, self._right, False),
        ):
            for name in list(whole_side):
                if not whole_side[name].tensor.is_readable:
                    continue
                parts = {
                    key: one
                    for key, one in part_side.items()
                    if f"\0{key}" not in self._found and one.tensor.is_readable
                }
                found = fused_parts(whole_side[name], parts, families(parts))
                if found is None:
                    continue
                groups, dtype = found
                layout = self._layout([self._stacked(group, parts, dtype) for group in groups], whole_side[name], dtype)
                names = [key for group in groups for key in group]
                told = [parts[group[0]].tensor.name for group in groups]
                if any(len(group) > 1 for group in groups):
                    told = [
                        f"{first} to {parts[group[-1]].tensor.name}" for first, group in zip(told, groups, strict=True)
                    ]
                if layout is None:
                    message = f"has the numbers of {' and '.join(told)} in an order that is not known"
                else:
                    message = f"is {layout_text(layout, told)}"
                sides = (names, [name]) if of_candidate else ([name], names)
                if not of_candidate:
                    of_whole = f"makes up the baseline's {self._left[name].tensor.name}"
                    message = f"together with {len(names) - 1} more, {of_whole}: it {message}"
                word: Word = "equivalent" if layout is not None else "differs"
                evidence = {"dtype": dtype, "groups": layout.groups if layout else None}
                relation = self._relation(word, "fused", *sides, message, layout=layout, evidence=evidence)
                self._settle(*sides, relation)

    def _stacked(self, names: list[str], parts: Mapping[str, Measured], dtype: str) -> Hashes:
        return np.concatenate([self._hashes(parts[name], dtype)[0] for name in names])

    def _layout(self, parts: list[Hashes], whole: Measured, dtype: str) -> Layout | None:
        return layout_of(parts, *self._hashes(whole, dtype))

    def _hashes(self, one: Measured, dtype: str) -> tuple[Hashes, Hashes]:
        """Hashes of rows and columns, computed once."""
        key = (id(one), dtype)
        if key not in self._known_hashes:
            self._known_hashes[key] = hashes(one.tensor, dtype)
        return self._known_hashes[key]

    def _find_rearranged(self) -> None:
        """Tensors of other names that have the same numbers in other places."""
        for name in list(self._right):
            candidate = self._right[name]
            for other, baseline in self._left.items():
                dtype = rearranged(baseline, candidate)
                if dtype is None or not (baseline.tensor.is_readable and candidate.tensor.is_readable):
                    continue
                message, layout = self._arranged(baseline, candidate, dtype)
                if message:
                    self._settle(
                        [other], [name],
                        self._relation("equivalent", "rearranged", [other], [name], message, layout=layout),
                    )  # fmt: skip
                    break

    def _arranged(self, baseline: Measured, candidate: Measured, dtype: str) -> tuple[str, Layout | None]:
        """A clause on tensors with the same numbers in other places, and their layout if it is a known one."""
        first, second = self._hashes(baseline, dtype), self._hashes(candidate, dtype)
        layout = layout_of([first[0]], *second)
        short = "" if baseline.tensor.dtype == candidate.tensor.dtype else f", rounded to {dtype}"
        if layout is not None:
            if layout.transpose and not any(layout.heads):
                return f"is the baseline's {baseline.tensor.name}, transposed{short}", layout
            return f"is the baseline's {layout_text(layout, [baseline.tensor.name])}{short}", layout
        for place, what in ((0, "rows"), (1, "columns")):
            if (clause := moved_rows(first[place], second[place])) and (place == 0 or len(first[1]) > 1):
                return f"is the baseline's {baseline.tensor.name}{short}, of which {clause.format(what)}", None
        return "", None

    def _unlike(self, name: str, contents: Mapping[Any, list[str]]) -> Relation:
        """How two tensors of one name differ."""
        baseline, candidate = self._baseline[name], self._candidate[name]
        both = [name], [name]
        if not candidate.is_constant:
            known = [other for key in content_keys(candidate) for other in contents.get(key, ()) if other != name]
            if known:
                other = self._baseline[likest(name, known)].tensor.name
                return self._relation("differs", "moved", [likest(name, known)], [name], f"is the baseline's {other}")
        if candidate.is_zero != baseline.is_zero:
            message = "is zero in all elements; the baseline's is not"
            if baseline.is_zero:
                message = "has numbers; the baseline's is zero in all elements"
            return self._relation("differs", "zero", *both, message)
        if not (baseline.tensor.is_readable and candidate.tensor.is_readable):
            return self._by_summary(name)
        dtype = common_dtype(baseline.tensor.dtype, candidate.tensor.dtype)
        same_shape = baseline.tensor.shape == candidate.tensor.shape
        if dtype is not None and rearranged(baseline, candidate):
            message, layout = self._arranged(baseline, candidate, dtype)
            if message:
                word: Word = "differs" if same_shape else "equivalent"
                return self._relation(word, "rearranged", *both, message, layout=layout)
        if not same_shape:
            return self._other_shape(name, dtype)
        kind, clause = self._shards(baseline, candidate, dtype)
        if kind:
            return self._relation("differs", kind, *both, clause)
        found = element_difference(baseline.tensor, candidate.tensor)
        rounded = found.kind in ("cast", "through")
        return self._relation(
            "equivalent" if rounded else "differs", found.kind, *both, found.message, evidence=found.evidence
        )

    def _shards(self, baseline: Measured, candidate: Measured, dtype: str | None) -> tuple[str, str]:
        """A kind and a clause on rows or columns that are there twice, or missing; empty if none are."""
        if dtype is None or not _is_partly_same(baseline, candidate, dtype):
            return "", ""
        first, second = self._hashes(baseline, dtype), self._hashes(candidate, dtype)
        is_matrix = len(baseline.tensor.shape) > 1
        for place, what in ((0, "rows"), (1, "columns")) if is_matrix else ((0, "elements"),):
            kind, clause = repeated_rows(first[place], second[place])
            if kind:
                return kind, clause.format(what)
        return "", ""

    def _other_shape(self, name: str, dtype: str | None) -> Relation:
        baseline, candidate = self._baseline[name], self._candidate[name]
        shapes = (baseline.tensor.shape, candidate.tensor.shape)
        rows = [matrix_shape(shape) for shape in shapes]
        evidence = {"shapes": [list(shape) for shape in shapes]}
        if dtype is not None and rows[0][1] == rows[1][1] and len(shapes[0]) == len(shapes[1]) == 2:
            first, second = self._hashes(baseline, dtype)[0], self._hashes(candidate, dtype)[0]
            if padded(first, second):
                more = abs(len(first) - len(second))
                longer = second if len(second) > len(first) else first
                zeros = not longer[-more:].any()
                verb = "has" if len(second) > len(first) else "lacks"
                what = f"{more} rows at the end, which are {'zero' if zeros else 'not zero'}"
                message = f"{verb} {what}; all {min(len(first), len(second))} other rows are the baseline's"
                word: Word = "equivalent" if zeros else "only"
                return self._relation(word, "padded", [name], [name], message, evidence=evidence)
        message = f"has the shape {list(shapes[1])}; the baseline's is {list(shapes[0])}"
        return self._relation("differs", "shape", [name], [name], message, evidence=evidence)

    def _by_summary(self, name: str) -> Relation:
        """How two tensors differ, as far as summaries tell."""
        baseline, candidate = self._baseline[name], self._candidate[name]
        first, second = baseline.own, candidate.own
        if baseline.tensor.shape != candidate.tensor.shape:
            return self._other_shape(name, None)
        size = norm_of(first)
        relative = float(distance(first, second)) / size if size else float("inf")
        dtypes = (baseline.tensor.dtype, candidate.tensor.dtype)
        u = max(UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes)
        evidence = {"relative": relative}
        if dtypes[0] != dtypes[1] and relative <= u:
            what = f"is {dtypes[1]} and the baseline's {dtypes[0]}"
            message = f"{what}: by their summaries, they differ by no more than a rounding"
            return self._relation("equivalent", "cast", [name], [name], message, evidence=evidence)
        message = f"differs: relative L2 difference about {relative:.2g}, from summaries"
        return self._relation("differs", "other", [name], [name], message, evidence=evidence)

    def _only(self, name: str, *, of_candidate: bool) -> Relation:
        side = self._candidate if of_candidate else self._baseline
        tensor = side[name].tensor
        names: tuple[list[str], list[str]] = ([], [name]) if of_candidate else ([name], [])
        whose = "candidate" if of_candidate else "baseline"
        zero = ", and is zero in all elements" if side[name].is_zero else ""
        message = f"is only in the {whose}: {tensor.dtype} {list(tensor.shape)}{zero}"
        return self._relation("only", f"only-{whose}", *names, message)


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
