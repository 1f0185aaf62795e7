"""What the other layers say of a layer: which of its tensors are which, and whether it is laid out as they are."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from traindiff.core.maps.entries import Layout
from traindiff.state.comparison import NUMBER, Relation, common_numbers, numbers, skeleton
from traindiff.state.measured import Measured

Numbers = tuple[int, ...]

NUMBER_OR_PLACE = re.compile(rf"{NUMBER.pattern}|\*")
"""A number in a pattern, or the place of one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Which tensors of a layer are which, with `*` in place of its numbers, and in which layout.

    Attributes:
        baseline: Names of the baseline.
        candidate: Names of the candidate.
        layout: How the several make up the one; None if nothing was moved.
    """

    baseline: tuple[str, ...]
    candidate: tuple[str, ...]
    layout: Layout | None

    def names(self, baseline: Numbers, candidate: Numbers) -> tuple[list[str], list[str]] | None:
        """The names in one layer; None if names have more numbers than that, or fewer."""
        pairs = ((self.baseline, baseline), (self.candidate, candidate))
        if any(one.count("*") != len(given) for names, given in pairs for one in names):
            return None
        return [_filled(one, baseline) for one in self.baseline], [_filled(one, candidate) for one in self.candidate]

    def numbers_in(self, name: str) -> Numbers | None:
        """The numbers of its layer in a name that is the candidate's first one there; None if it is none."""
        first = self.candidate[0]
        if skeleton(name) != skeleton(first):
            return None
        places, given = NUMBER_OR_PLACE.findall(first), numbers(name)
        found = tuple(zip(places, given, strict=False))
        if len(places) != len(given) or any(place != "*" and int(place[:18]) != number for place, number in found):
            return None
        return tuple(number for place, number in found if place == "*")


def _filled(pattern: str, given: Numbers) -> str:
    parts = pattern.split("*")
    return "".join(part + digits for part, digits in zip(parts, [*map(str, given), ""], strict=True))


def numbers_of(names: Sequence[str]) -> Numbers | None:
    """The numbers that names of one layer have in common, without those of its experts; None if they have none."""
    return common_numbers(names) or None


def _patterns_of(names: Sequence[str]) -> tuple[str, ...]:
    """Names with `*` in place of the numbers that they have in common."""
    table = [numbers(name) for name in names]
    same = [len({*column}) == 1 for column in zip(*table, strict=True)]
    found = []
    for name in names:
        kept = iter(same)

        def place(match: re.Match[str], kept: Iterator[bool] = kept) -> str:
            return "*" if next(kept) else match[0]

        found.append(NUMBER.sub(place, name))
    return tuple(found)


def is_settled(relation: Relation) -> bool:
    """True if tensors of both sides are the same, under names of their own."""
    paired = relation.word in ("identical", "equivalent") and relation.baseline and relation.candidate
    return bool(paired) and relation.kind != "tied"


def patterns(relations: Iterable[Relation]) -> Counter[Pattern]:
    """The patterns of relations of single layers, by the number of layers."""
    return Counter(
        Pattern(baseline=_patterns_of(one.baseline), candidate=_patterns_of(one.candidate), layout=one.layout)
        for one in relations
        if is_settled(one) and numbers_of(one.baseline) is not None and numbers_of(one.candidate) is not None
    )


def layers_of(relations: Iterable[Relation]) -> dict[Numbers, Numbers]:
    """The numbers of the baseline's layer that most tensors of each layer of the candidate are in."""
    found: dict[Numbers, Counter[Numbers]] = {}
    for one in relations:
        own, other = numbers_of(one.candidate), numbers_of(one.baseline)
        if is_settled(one) and own is not None and other is not None:
            found.setdefault(own, Counter())[other] += 1
    return {own: counts.most_common(1)[0][0] for own, counts in found.items()}


def expected(
    relations: Sequence[Relation], baseline: Mapping[str, object], candidate: Mapping[str, object]
) -> Iterator[tuple[list[str], list[str], Layout | None]]:
    """What is left of both sides, and belongs together if it is as in the other layers.

    Args:
        relations: Of tensors that are settled.
        baseline: Names that are left.
        candidate: Names that are left.

    Yields:
        Names of the baseline, of the candidate, and the layout.
    """
    layers = layers_of(relations)
    used: set[str] = set()
    for pattern, _ in patterns(relations).most_common():
        for name in candidate:
            own = pattern.numbers_in(name)
            if name in used or not own or "*" not in pattern.baseline[0]:
                continue
            names = pattern.names(layers.get(own, own), own)
            if names is None:
                continue
            here, there = names
            if all(one in baseline and f"\0{one}" not in used for one in here) and all(
                one in candidate and one not in used for one in there
            ):
                used |= {*there, *(f"\0{one}" for one in here)}
                yield here, there, pattern.layout


Holds = Callable[[Sequence[str], Sequence[str], Layout | None], bool]
"""Whether tensors of the baseline are those of the candidate in a layout."""


def laid_out_alike(relations: Sequence[Relation], shapes: Mapping[str, Measured], holds: Holds) -> list[Relation]:
    """The relations, of which those of layers that are laid out unlike the others differ.

    Code finds the tensors of all layers by one pattern of names, and treats them alike. So a layer whose rows are
    still rotary halves, or whose gate and up are swapped, is another model, whatever its names are.

    Args:
        relations: Of all tensors of the candidate.
        shapes: Tensors of the candidate, by name: only those of one shape are held against each other.
        holds: Is asked whether the layout of the other layers fits as well.
    """
    kinds: dict[tuple[str, tuple[int, ...]], dict[Pattern, list[int]]] = {}
    for number, one in enumerate(relations):
        measured = shapes.get(one.name)
        # what has no summary was paired by its name, or by a map
        if is_settled(one) and NUMBER.search(one.name) and measured and measured.summaries and not measured.is_constant:
            for pattern in patterns([one]):
                key = (skeleton(one.name), measured.tensor.shape)
                kinds.setdefault(key, {}).setdefault(pattern, []).append(number)
    usual = {key: max(ways, key=lambda way: len(ways[way])) for key, ways in kinds.items()}
    sources = {tuple(sorted(way.baseline)) for way in usual.values()}
    found = list(relations)
    layers = layers_of(relations)
    for key, ways in kinds.items():
        for way, places in ways.items():
            # a tensor of a name that is the baseline's for nothing else is only named otherwise
            if way == usual[key] or tuple(sorted(way.baseline)) not in sources:
                continue
            for place in places:
                one = relations[place]
                own = numbers_of(one.candidate) or ()
                names = usual[key].names(layers.get(own, own), own)
                if names is not None and holds(*names, usual[key].layout):
                    continue
                count = len(ways[usual[key]])
                others = f"{count} other layer{'s' if count > 1 else ''}"
                how = "otherwise" if way.baseline == usual[key].baseline else "of other tensors"
                message = f"{one.message}; in {others}, {key[0]} is made up {how}"
                found[place] = replace(one, word="differs", kind="unlike", message=message)
    return found


def biases_as_weights(relations: Sequence[Relation], baseline: Collection[str], holds: Holds) -> list[Relation]:
    """The relations, of which those of biases that do not belong to the weights of their modules differ.

    What moves the rows of a weight moves the outputs of its module, and the elements of its bias with them.

    Args:
        relations: Of all tensors of the candidate.
        baseline: Names of the baseline.
        holds: Is asked whether the biases of the weights' modules, laid out as these, are the candidate's as well.
    """
    weights = {modules[1]: one for one in relations if is_settled(one) and (modules := _modules(one, "weight"))}
    found = list(relations)
    for number, one in enumerate(relations):
        modules = _modules(one, "bias") if is_settled(one) else None
        of_weights = None if modules is None else weights.get(modules[1])
        if modules is None or of_weights is None:
            continue
        own = [f"{name.rpartition('.')[0]}.bias" for name in of_weights.baseline]
        layouts = [
            None if each is None else replace(each, transpose=False, columns=False)
            for each in (one.layout, of_weights.layout)
        ]
        plain = [layout is None or layout.is_plain for layout in layouts]
        alike = tuple(own) == one.baseline and (all(plain) or layouts[0] == layouts[1])
        if alike or not all(name in baseline for name in own) or holds(own, one.candidate, layouts[1]):
            continue
        of_weight = skeleton(of_weights.message)
        message = f"{one.message}; its weight is another one, or laid out otherwise ({of_weight})"
        found[number] = replace(one, word="differs", kind="unlike", message=message)
    return found


def _modules(relation: Relation, parameter: str) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """The modules of both sides whose parameters of this name a relation is about; None if it is about others."""
    sides = [[name.rpartition(".") for name in names] for names in (relation.baseline, relation.candidate)]
    if not all(last == parameter for side in sides for _, _, last in side):
        return None
    return tuple(module for module, _, _ in sides[0]), tuple(module for module, _, _ in sides[1])
