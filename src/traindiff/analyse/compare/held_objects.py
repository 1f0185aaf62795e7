"""What a training holds beside parameters and optimizer, after loading against when it was saved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from traindiff.analyse.compare.resumption import StateDifference

Leaf = Mapping[str, Any]
Objects = Mapping[tuple[str, str], Leaf]
"""By name of the object and place in it: a number, or the digest of a tensor, and `what` the object is."""

_ABOUT = {
    "buffer": "The buffer {}",
    "scheduler": "The scheduler {} ({})",
    "scaler": "The loss scaler {}",
    "weights": "The weights {} ({})",
    "tensor": "The tensor {}",
    "optimizer": "The optimizer {} ({})",
}
_PARTS = {"tensor": "tensor", "counter": "value"}
_TOLD = 3
"""Parts of an object that are named; of more, a list or dictionary has one sentence."""


def object_differences(
    saved: Sequence[Objects],
    fresh: Sequence[Objects],
    resumed: Sequence[Objects],
    *,
    whole: tuple[Sequence[Objects], Sequence[Objects]],
    steps_agree: bool,
    same_bits: bool,
) -> tuple[list[StateDifference], list[str]]:
    """Objects that were not restored, and notes on those that are not judged.

    Args:
        saved: By rank: when the training was saved.
        fresh: Before loading.
        resumed: After loading.
        whole: In the training that never stopped, at the same step and at its end.
        steps_agree: Whether the steps after loading agree with those without a stop. A number that the training holds
            may be a mere count of its own, so it is told as a difference only if they do not.
        same_bits: Whether they have the same bits. A generator whose numbers make no difference is no difference.
    """
    found: list[StateDifference] = []
    noted: list[StateDifference] = []
    notes: list[str] = []
    ranks = range(len(saved)) if len(saved) == len(resumed) else range(1)
    several = len(saved) != len(resumed)
    if several:
        notes.append(
            "The state of random generators was not compared, because other ranks draw from them: with dropout, the "
            "steps cannot be the same."
        )
    for rank in ranks:
        apart = _apart(saved[rank], resumed[rank])
        for name, leaves in apart.items():
            what = str(saved[rank][name, leaves[0]]["what"])
            unsteady = [
                leaf for leaf in leaves if not _same(saved[rank].get((name, leaf)), whole[0][rank].get((name, leaf)))
            ]
            if what == "generator":
                if several:
                    continue
                drawn = not _same(whole[0][rank].get((name, "")), whole[1][rank].get((name, "")))
                was_fresh = _same(fresh[rank].get((name, "")), resumed[rank].get((name, "")))
                effect = _without_effect(drawn=drawn, same_bits=same_bits)
                one = _of_generator(name, restored=not was_fresh, effect=effect)
                (noted if effect else found).append(one)
                continue
            if len(unsteady) == len(leaves) and what in ("counter", "object"):
                notes.append(f"{name} is another one in each run of the training, and was not compared.")
                continue
            one = _difference(what, name, leaves, (saved[rank], fresh[rank], resumed[rank]))
            (noted if what == "counter" and (steps_agree or several) else found).append(one)
    notes += [one.message for one in _parts_together(_unique(noted))]
    return _parts_together(_unique(found)), list(dict.fromkeys(notes))


def _unique(found: Iterable[StateDifference]) -> list[StateDifference]:
    """The first of each message: several ranks may say the same."""
    unique: dict[str, StateDifference] = {}
    for one in found:
        unique.setdefault(one.message, one)
    return list(unique.values())


def _parts_together(found: Iterable[StateDifference]) -> list[StateDifference]:
    """What one list or dictionary holds in one sentence, e.g. hand-written averages of all parameters, or a history."""
    groups: dict[tuple[object, ...], list[StateDifference]] = {}
    for one in found:
        holder, bracket, _ = one.sites[0].rpartition("[")
        key = (one.what, holder, one.evidence["restored"]) if one.what in _PARTS and bracket else (one.message,)
        groups.setdefault(key, []).append(one)
    told: list[StateDifference] = []
    for group in groups.values():
        told += [_as_one(group)] if len(group) > _TOLD else group
    return told


def _as_one(group: Sequence[StateDifference]) -> StateDifference:
    names = tuple(one.sites[0] for one in group)
    what, restored = group[0].what, group[0].evidence["restored"]
    why = "are not as they were saved" if restored else "were not restored"
    holder = names[0].rpartition("[")[0]
    message = f"{len(names)} {_PARTS[what]}s of {holder} ({names[0]}, {names[1]}, ...) {why}."
    return StateDifference(what=what, sites=names, message=message, evidence={"parts": [], "restored": restored})


def _apart(saved: Objects, resumed: Objects) -> dict[str, list[str]]:
    """By name of the object: its parts that differ, or that are not there after loading."""
    found: dict[str, list[str]] = {}
    for (name, leaf), one in saved.items():
        if not _same(one, resumed.get((name, leaf))):
            found.setdefault(name, []).append(leaf)
    return found


def differ_in(saved: Objects, resumed: Objects, what: str) -> bool:
    """Whether an object of one kind (`what`, e.g. `scheduler`) is not as it was saved."""
    return any(one["what"] == what and not _same(one, resumed.get(place)) for place, one in saved.items())


def _same(one: Leaf | None, other: Leaf | None) -> bool:
    if one is None or other is None:
        return one is other
    names = ("value", "digest", "dtype", "shape")
    return all(one.get(name) == other.get(name) for name in names) or _are_nan(one, other)


def _are_nan(one: Leaf, other: Leaf) -> bool:
    values = one.get("value"), other.get("value")
    return all(isinstance(value, float) and value != value for value in values)


def _without_effect(*, drawn: bool, same_bits: bool) -> str:
    """Why it makes no difference that a generator was not restored; empty if it may make one."""
    if not drawn:
        return "the training did not draw from it in these steps"
    return "these steps have the same bits in spite of it" if same_bits else ""


def _of_generator(name: str, *, restored: bool, effect: str) -> StateDifference:
    state = "is not in the state in which it was saved" if restored else "was not restored"
    begin = f"{name[:1].upper()}{name[1:]}" if "'s generator" in name else f"The generator {name}"
    drawn = "dropout masks, shuffles and samples" if name.startswith("torch") else "the numbers drawn from it"
    effect = effect or f"{drawn} cannot be the same"
    return StateDifference(what="generator", sites=(name,), message=f"{begin} {state}: {effect}.", evidence={})


def _difference(
    what: str, name: str, leaves: Sequence[str], states: tuple[Objects, Objects, Objects]
) -> StateDifference:
    saved, fresh, resumed = states
    kept = all(_same(fresh.get((name, leaf)), resumed.get((name, leaf))) for leaf in leaves)
    made_by = str(saved[name, leaves[0]]["type"])
    if what == "counter":
        values = _values(saved[name, ""], resumed.get((name, "")))
        message = f"{name} {values}{': it was not restored' if kept else ''}."
    else:
        about = _ABOUT.get(what, "The object {} ({})").format(name, made_by)
        told = [text for leaf in leaves if (text := _part(leaf, saved[name, leaf], resumed.get((name, leaf))))]
        more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
        why = "was not restored" if kept else "is not as it was saved"
        if what == "buffer" and kept:
            why = "was not loaded: what the recipe made is still there"
        details = f" ({'; '.join(told[:_TOLD])}{more})" if told else ""
        message = f"{about} {why}{details}."
    evidence = {"parts": list(leaves), "restored": not kept}
    return StateDifference(what=what, sites=(name,), message=message, evidence=evidence)


def _part(leaf: str, own: Leaf, other: Leaf | None) -> str:
    if not leaf:
        return "" if other is None or "value" not in own else _values(own, other)
    place = leaf.removeprefix(".")
    if other is None:
        return f"{place} is not there"
    if "value" in own:
        return f"{place} {_values(own, other)}"
    return f"{place} is zero" if other.get("zero") and not own.get("zero") else f"{place} has other values"


def _values(own: Leaf, other: Leaf | None) -> str:
    return "is not there" if other is None else f"is {_text(other)}; it was {_text(own)}"


def _text(leaf: Leaf) -> str:
    value = leaf.get("value")
    return f"{value:g}" if isinstance(value, float) else repr(value)
