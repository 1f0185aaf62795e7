"""What a training holds beside parameters and optimizer, after loading against when it was saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
_TOLD = 3
"""Parts of an object that are named."""


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
                _add(found, notes, one, finding=not effect)
                continue
            if len(unsteady) == len(leaves) and what in ("counter", "object"):
                notes.append(f"{name} is another one in each run of the training, and was not compared.")
                continue
            one = _difference(what, name, leaves, (saved[rank], fresh[rank], resumed[rank]))
            _add(found, notes, one, finding=what != "counter" or not (steps_agree or several))
    unique: dict[str, StateDifference] = {}
    for one in found:
        unique.setdefault(one.message, one)
    return list(unique.values()), list(dict.fromkeys(notes))


def _add(found: list[StateDifference], notes: list[str], one: StateDifference, *, finding: bool) -> None:
    if finding:
        found.append(one)
    else:
        notes.append(one.message)


def _apart(saved: Objects, resumed: Objects) -> dict[str, list[str]]:
    """By name of the object: its parts that differ, or that are not there after loading."""
    found: dict[str, list[str]] = {}
    for (name, leaf), one in saved.items():
        if not _same(one, resumed.get((name, leaf))):
            found.setdefault(name, []).append(leaf)
    return found


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
    effect = effect or "dropout masks, shuffles and samples cannot be the same"
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
