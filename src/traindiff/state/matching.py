"""Find the partner of every tensor, and say how the two differ: cheap and certain answers first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from traindiff.core.maps.entries import Layout
from traindiff.state.arrangements import (
    KnownHashes,
    Lines,
    are_rows,
    hash_as_row,
    holds,
    layout_of,
    layout_text,
    listed_names,
    of_each,
    order_clause,
)
from traindiff.state.comparison import Relation, Word, numbers, skeleton
from traindiff.state.differences import arranged, difference, put_together, rounded_to
from traindiff.state.elements import UNFIT
from traindiff.state.equal_bits import Equality
from traindiff.state.layer_order import in_order
from traindiff.state.measured import (
    MOST_THREADS,
    Measured,
    by_own_name,
    common_dtype,
    keys_by_own_name,
    overflows,
    same_bits,
)
from traindiff.state.other_layers import biases_as_weights, expected, laid_out_alike, layers_of
from traindiff.state.pairing import Sums, by_content, content_keys, likest, rearranged
from traindiff.state.stored import Role


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
        self._hashes = KnownHashes()

    def relations(self) -> list[Relation]:
        """A relation for every tensor, in the order of the candidate; those of the baseline alone last.

        Raises:
            CheckpointError: A file has ended.
        """
        unlike = [name for name in self._candidate if name in self._baseline and not self._same(name, name)]
        self._find_renamed()
        self._find_copies()
        self._find_fused(in_any_layer=False)
        self._find_fused(in_any_layer=True)
        self._find_rearranged()
        self._pair_constants()
        self._compare_as_in_other_layers()
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
            self._found.setdefault(name, self._moved(name, contents) or self._only(name, of_candidate=True))
        ordered = [self._found[name] for name in self._candidate if name in self._found]
        elsewhere = {name for one in ordered if one.kind == "moved" for name in one.baseline}
        rest = [
            self._found.get(f"\0{name}") or self._only(name, of_candidate=False)
            for name in self._left
            if self._baseline[name].tensor.name not in elsewhere
        ]
        alike = laid_out_alike(ordered, by_own_name(self._candidate), self._holds)
        alike = biases_as_weights(alike, by_own_name(self._baseline), self._holds)
        return [*in_order(alike, by_own_name(self._baseline)), *rest]

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
        if known == "overflown" or (known == "unequal" and short is not None and overflows((first, second), short)):
            message = f"{about}, rounded to {short}, {UNFIT}"
            relation = self._relation(
                "differs", "overflow", [baseline], [candidate], message, evidence={"dtype": short}
            )
            self._settle([baseline], [candidate], relation)
            return True
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

    def _pair_constants(self) -> None:
        """Pair tensors that are one number throughout, where as many of each layer are left on both sides.

        Which layer is which is known from other tensors. Fused ones are made up as others of their layer are.
        """
        layers = layers_of(self._found.values())
        sides: list[dict[tuple[Any, ...], list[str]]] = [{}, {}]
        for names, side, places in zip(sides, (self._left, self._right), ({}, layers), strict=True):
            for name, one in side.items():
                if one.is_constant and one.tensor.size:
                    place = places.get(own := numbers(name), own)
                    names.setdefault((place, one.tensor.shape, float(one.own["minimum"])), []).append(name)
        for key, here in sides[0].items():
            there = sides[1].get(key, [])
            if len(here) == len(there):
                for name in there:
                    left = [one for one in here if one in self._left]
                    self._same(likest(name, left, layers.get(numbers(name))), name)
        self._fuse_constants()

    def _fuse_constants(self) -> None:
        """Biases that are one number throughout are fused as the weights of their modules are."""
        for one in [one for one in self._found.values() if one.kind == "fused" and one.layout is not None]:
            sides = [
                {
                    name.rpartition(".")[0]: key
                    for name, key in keys_by_own_name(side).items()
                    if not name.endswith(".weight")
                }
                for side in (self._left, self._right)
            ]
            modules = [[name.rpartition(".")[0] for name in names] for names in (one.baseline, one.candidate)]
            if not all(name in side for side, names in zip(sides, modules, strict=True) for name in names):
                continue
            first, second = ([side[name] for name in names] for side, names in zip(sides, modules, strict=True))
            parts = [self._left[name] for name in first], [self._right[name] for name in second]
            known = {float(part.own["minimum"]) for part in chain(*parts) if _is_one_number(part)}
            sizes = [sum(part.tensor.size for part in side) for side in parts]
            if len(known) == 1 and sizes[0] == sizes[1] and all(map(_is_one_number, chain(*parts))):
                (value,) = known
                of_baseline = " and ".join(part.tensor.name for part in parts[0])
                message = f"is {value:g} in all elements, like {of_baseline}"
                layout = replace(one.layout, transpose=False, columns=False) if one.layout else None
                self._settle(
                    first, second, self._relation("equivalent", "fused", first, second, message, layout=layout)
                )

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
                word: Word = "equivalent"
                message = f"is {other} again: tied in the {lacking}, which has it once"
                if skeleton(other) == skeleton(own[name].tensor.name):  # one layer more is another model
                    word = "only"
                    message = f"is {other} again, and the {lacking} lacks it: a layer that is there twice, or is tied"
                key = name if whose == "candidate" else f"\0{name}"
                self._found[key] = self._relation(word, "tied", *names, message)
                if whose == "candidate":
                    here.pop(name)

    def _find_fused(self, *, in_any_layer: bool) -> None:
        """What is one tensor on one side, and several of one layer on the other, be it another layer."""
        for whole_side, part_side, of_candidate in (
            (self._right, self._left, True),
            (self._left, self._right, False),
        ):
            parts = {
                key: one for key, one in part_side.items() if f"\0{key}" not in self._found and one.tensor.is_readable
            }
            sums = Sums(parts)
            for name in list(whole_side):
                if name not in whole_side or not whole_side[name].tensor.is_readable:
                    continue
                found = sums.of(whole_side[name], part_side, in_any_layer=in_any_layer)
                if found is None:
                    continue
                groups, dtype = found
                lines = self._hashes.of(whole_side[name].tensor, dtype)
                names = [key for group in groups for key in group]
                as_rows = are_rows([parts[key].tensor.shape for key in names], whole_side[name].tensor.shape)
                layout = layout_of(
                    [self._stacked([parts[key] for key in group], dtype, as_rows) for group in groups], lines
                )
                told = [parts[group[0]].tensor.name for group in groups]
                if any(len(group) > 1 for group in groups):
                    told = [
                        f"{first} to {parts[group[-1]].tensor.name}" for first, group in zip(told, groups, strict=True)
                    ]
                if layout is None:
                    clause = order_clause([self._stacked([parts[key]], dtype, as_rows) for key in names], lines)
                    message = f"has the numbers of {' and '.join(told)} {clause}"
                else:
                    message = f"is {layout_text(layout, told)}"
                together = [whole_side[name], *(parts[key] for key in names)]
                message += rounded_to(dtype, *together)
                sides = (names, [name]) if of_candidate else ([name], names)
                if not of_candidate:
                    of_whole = f"makes up the baseline's {self._left[name].tensor.name}"
                    message = f"together with {len(names) - 1} more, {of_whole}: it {message}"
                word: Word = "equivalent" if layout is not None else "differs"
                kind = "fused"
                if overflows(together, dtype):
                    word, kind, message = "differs", "overflow", f"{message}, {UNFIT}"
                evidence = {"dtype": dtype, "groups": layout.groups if layout else None}
                layout = layout and of_each(layout, len(groups[0]))
                relation = self._relation(word, kind, *sides, message, layout=layout, evidence=evidence)
                self._settle(*sides, relation)

    def _stacked(self, parts: Sequence[Measured], dtype: str, as_rows: bool) -> Lines:  # noqa: FBT001
        """The rows of one part after the other, or each part as a row; also the columns, if all are matrices."""
        if as_rows:
            return Lines(np.concatenate([hash_as_row(part.tensor, dtype) for part in parts]))
        found = [self._hashes.of(part.tensor, dtype) for part in parts]
        rows = np.concatenate([rows for rows, _ in found])
        are_matrices = all(len(part.tensor.shape) in (2, 3) for part in parts)
        return Lines(rows, np.concatenate([columns for _, columns in found])) if are_matrices else Lines(rows)

    def _find_rearranged(self) -> None:
        """Tensors of other names that have the same numbers in other places."""
        places: dict[tuple[str, int, int], list[str]] = {}
        for other, one in self._left.items():
            for dtype, summary in one.summaries.items() if one.tensor.is_readable else ():
                places.setdefault((dtype, int(summary["multiset"]), one.tensor.size), []).append(other)
        for name, candidate in list(self._right.items()):
            keys = [(dtype, int(one["multiset"]), candidate.tensor.size) for dtype, one in candidate.summaries.items()]
            for other in chain.from_iterable(places.get(key, ()) for key in keys):
                baseline = self._left.get(other)
                short = None if baseline is None else rearranged(baseline, candidate)
                if baseline is None or short is None or not candidate.tensor.is_readable:
                    continue
                message, layout = arranged(baseline, candidate, short, self._hashes)
                if message:
                    word: Word = "equivalent"
                    kind = "rearranged"
                    if overflows((baseline, candidate), short):
                        word, kind, message = "differs", "overflow", f"{message}, {UNFIT}"
                    relation = self._relation(word, kind, [other], [name], message, layout=layout)
                    self._settle([other], [name], relation)
                    break

    def _compare_as_in_other_layers(self) -> None:
        """Compare what belongs together if it does in the other layers, and has no counterpart of its contents."""
        left, right = keys_by_own_name(self._left), keys_by_own_name(self._right)
        for baseline, candidate, layout in list(expected(list(self._found.values()), left, right)):
            sides = [left[name] for name in baseline], [right[name] for name in candidate]
            made = put_together([self._left[key] for key in sides[0]], [self._right[key] for key in sides[1]], layout)
            if made is None:
                continue
            named = listed_names(baseline)
            if same_bits(*made):
                kind = "fused" if layout else "renamed" if made[0].tensor.dtype == made[1].tensor.dtype else "cast"
                equal: Word = "identical" if kind == "renamed" else "equivalent"
                message = f"by its name, is the baseline's {named}, as in the other layers"
                self._settle(*sides, self._relation(equal, kind, *sides, message, layout=layout))
                continue
            found = difference(*made, self._hashes)
            word: Word = found.word if found.word != "only" else "differs"
            message = f"by its name, is the baseline's {named}, and {found.message}"
            relation = self._relation(word, found.kind, *sides, message, evidence=found.evidence, layout=layout)
            self._settle(*sides, relation)

    def _holds(self, baseline: Sequence[str], candidate: Sequence[str], layout: Layout | None) -> bool:
        """Whether tensors, by their own names, make up the other side's in a layout."""
        first, second = by_own_name(self._baseline), by_own_name(self._candidate)
        if not (all(name in first for name in baseline) and all(name in second for name in candidate)):
            return False
        of_candidate = len(candidate) == 1
        parts = [first[name] for name in baseline] if of_candidate else [second[name] for name in candidate]
        whole = second[candidate[0]] if of_candidate else first[baseline[0]]
        dtype = common_dtype(whole.tensor.dtype, parts[0].tensor.dtype)
        if dtype is None or not all(one.tensor.is_readable for one in (*parts, whole)):
            return False
        if layout is None:
            return same_bits(parts[0], whole)
        if len(parts) != len(layout.order):
            return True  # stacked experts
        as_rows = are_rows([one.tensor.shape for one in parts], whole.tensor.shape)
        lines = [self._stacked([one], dtype, as_rows) for one in parts]
        return holds(layout, lines, self._hashes.of(whole.tensor, dtype))

    def _moved(self, name: str, contents: Mapping[Any, list[str]]) -> Relation | None:
        """What a tensor of the candidate holds of the baseline's under another name; None if nothing."""
        candidate = self._candidate[name]
        if candidate.is_constant or not candidate.summaries:
            return None
        known = [other for key in content_keys(candidate) for other in contents.get(key, ()) if other != name]
        if not known:
            return None
        other = likest(name, known)
        message = f"is the baseline's {self._baseline[other].tensor.name}"
        return self._relation("differs", "moved", [other], [name], message)

    def _unlike(self, name: str, contents: Mapping[Any, list[str]]) -> Relation:
        """How two tensors of one name differ."""
        moved = self._moved(name, contents)
        if moved is not None:
            return moved
        found = difference(self._baseline[name], self._candidate[name], self._hashes)
        message = found.message + (self._untied(name, contents) if found.word == "differs" else "")
        return self._relation(
            found.word, found.kind, [name], [name], message, evidence=found.evidence, layout=found.layout
        )

    def _untied(self, name: str, contents: Mapping[Any, list[str]]) -> str:
        """A clause on the tensor that this one is in the baseline, and no longer in the candidate."""
        own = self._candidate[name]
        if len(own.tensor.shape) != 2:
            return ""
        for other in contents.get(content_keys(self._baseline[name])[0], ()):
            there = self._candidate.get(other)
            known = there is not None and there.tensor.dtype == own.tensor.dtype and bool(there.summaries)
            # copies of layers or of networks, which are equal at the start, have the same modules inside
            alike = skeleton(".".join(other.split(".")[-2:])) == skeleton(".".join(name.split(".")[-2:]))
            if there is not None and known and not alike and not same_bits(there, own):
                named = self._baseline[other].tensor.name
                return f"; in the baseline it is {named} again (tied), in the candidate it is not"
        return ""

    def _only(self, name: str, *, of_candidate: bool) -> Relation:
        side = self._candidate if of_candidate else self._baseline
        tensor = side[name].tensor
        names: tuple[list[str], list[str]] = ([], [name]) if of_candidate else ([name], [])
        whose = "candidate" if of_candidate else "baseline"
        zero = ", and is zero in all elements" if side[name].is_zero else ""
        message = f"is only in the {whose}: {tensor.dtype} {list(tensor.shape)}{zero}"
        return self._relation("only", f"only-{whose}", *names, message)


def _is_one_number(one: Measured) -> bool:
    """Whether all elements are the number that its extremes are, which summaries of complex numbers do not have."""
    return one.is_constant and not one.tensor.dtype.startswith("complex")
