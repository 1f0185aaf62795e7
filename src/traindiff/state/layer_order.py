"""Whether the layers of both sides are in one order: those that are not, and sentences on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from traindiff.state.comparison import NUMBER, Relation, common_numbers, numbers, skeleton
from traindiff.state.measured import Measured, same_bits

_MOVES_NAMED = 4
"""Of layers in another order, so many runs or pairs are named."""


def in_order(relations: Sequence[Relation], baseline: Mapping[str, Measured]) -> list[Relation]:
    """The relations, of which those of renamed layers that are in another order than the baseline's differ.

    Numbers may begin elsewhere, e.g. with 1, and skip some.

    Args:
        relations: Of all tensors of the candidate.
        baseline: Tensors of the baseline, by their own names. Which of two equal ones a layer holds makes no
            difference.
    """
    groups: dict[tuple[tuple[str, ...], ...], list[Relation]] = {}
    for one in relations:
        own, other = common_numbers(one.candidate), common_numbers(one.baseline)
        if one.word in ("identical", "equivalent") and len(own) == len(other) > 0:
            sides = (tuple(map(skeleton, one.candidate)), tuple(map(skeleton, one.baseline)))
            groups.setdefault(sides, []).append(one)
    moved: dict[str, Relation] = {}
    for group in groups.values():
        by_candidate = sorted(group, key=lambda one: common_numbers(one.candidate))
        by_baseline = sorted(group, key=lambda one: common_numbers(one.baseline))
        for one, expected in zip(by_candidate, by_baseline, strict=True):
            pairs = zip(one.baseline, expected.baseline, strict=True)
            if one is not expected and not all(same_bits(baseline[here], baseline[there]) for here, there in pairs):
                moved[one.candidate[0]] = replace(one, word="differs", kind="moved")
    return [moved.get(one.name, one) for one in relations]


def moved_sentences(relations: Sequence[Relation]) -> list[str]:
    """Sentences on layers that hold those of other layers: shifted, swapped, or in another order."""
    all_moved = [one for one in relations if one.kind == "moved"]
    moved = [one for one in all_moved if _is_renumbered(one)]
    found: dict[tuple[str, int], list[int]] = {}
    for one in moved:
        pairs = zip(NUMBER.finditer(one.candidate[0]), numbers(one.baseline[0]), strict=True)
        apart = [(match, there) for match, there in pairs if int(match[0][:18]) != there]
        if len(apart) == 1:
            [(match, there)] = apart
            found.setdefault((one.candidate[0][: match.start()], int(match[0][:18])), []).append(there)
    by_prefix: dict[str, dict[int, int]] = {}
    for (prefix, here), sources in sorted(found.items()):
        if len(set(sources)) == 1:
            by_prefix.setdefault(prefix, {})[here] = sources[0]
    sizes = _tensors_of_layers(relations) if by_prefix else {}
    layers = []
    for prefix, places in by_prefix.items():
        total = sum(sizes[prefix, here] for here in places)
        held = sum(len(found[prefix, here]) for here in places)
        which = f", in {held} of {total} tensors" if held < total else ""
        layers += [f"{prefix.rstrip('.')}: {text}{which}." for text in _moves(places)]
    return [*layers, *_swapped({one.candidate[0]: one.baseline[0] for one in all_moved if one not in moved})]


def _is_renumbered(moved: Relation) -> bool:
    own, other = numbers(moved.candidate[0]), numbers(moved.baseline[0])
    return len(own) == len(other) and own != other


def _tensors_of_layers(relations: Iterable[Relation]) -> Counter[tuple[str, int]]:
    """How many tensors of the candidate begin with a text and a number."""
    return Counter(
        (name[: match.start()], int(match[0][:18]))
        for relation in relations
        for name in relation.candidate
        for match in NUMBER.finditer(name)
    )


def _swapped(holds: Mapping[str, str]) -> list[str]:
    """Sentences on tensors of other names that have changed places, one for all layers."""
    found: dict[tuple[str, str], int] = {}
    for name, other in holds.items():
        if holds.get(other) == name and name < other:
            key = (skeleton(name), skeleton(other))
            found[key] = found.get(key, 0) + 1
    return [
        f"{first} and {second} are swapped{f', {count} times' if count > 1 else ''}."
        for (first, second), count in found.items()
    ]


def _moves(places: Mapping[int, int]) -> list[str]:
    """Clauses on layers of one list, by number: whose they hold."""
    pairs = [(here, there) for here, there in places.items() if places.get(there) == here and here < there]
    rest = [here for here in places if places.get(places[here]) != here]
    runs: list[list[int]] = []
    for here in rest:
        if runs and here == runs[-1][-1] + 1 and places[here] == places[runs[-1][-1]] + 1:
            runs[-1].append(here)
        else:
            runs.append([here])
    held = [
        f"{_span(run)} hold{'s' * (len(run) == 1)} what the baseline has in {_span(places[one] for one in run)}"
        for run in runs
    ]
    if len(runs) == 1 and len(rest) > 1:
        held[0] += ": layers are shifted"
    swapped = [f"{here} and {there}" for here, there in pairs]
    return [*([f"{_first_of(swapped)} are swapped"] if swapped else []), *([_first_of(held)] if held else [])]


def _span(numbers: Iterable[int]) -> str:
    first, *others = numbers
    return f"{first} to {others[-1]}" if others else f"{first}"


def _first_of(texts: Sequence[str]) -> str:
    more = len(texts) - _MOVES_NAMED
    return ", ".join(texts[:_MOVES_NAMED]) + (f" and {more} more" if more > 0 else "")
