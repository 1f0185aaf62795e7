"""Checks of single settings of `record`.

Each check takes what the user wrote and returns it in one form, or appends to `problems` what is wrong with it and
returns anything of the same type.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeGuard

from traindiff.core.steps import ALL_STEPS, StepSelection, parse_steps
from traindiff.core.tap_registry import OBSERVABLE, OBSERVED_BY_DEFAULT
from traindiff.errors import Problem

DETAILS = ("summary", "exponents", "signs", "md5", "tensors")
"""Parts of a tensor that can be recorded; `summary` always is."""

SampleOrder = Literal["blocks", "interleaved"]
"""How data-parallel ranks share the samples of a global batch: each a block of them, or one each in turn."""

SAMPLE_ORDERS: tuple[SampleOrder, ...] = ("blocks", "interleaved")

_SEEDED = ("ulp", "reorder", "channel")
_REPLICAS = (*_SEEDED, "float64")
_REPLICA = re.compile(r"(?P<kind>[^:]*)(:(?P<seed>[0-9]{1,18}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetting:
    """How a training is perturbed within rounding.

    Attributes:
        kind: `ulp`, `reorder`, `channel` or `float64`.
        seed: Number of the perturbation; 0 for `float64`, which is not random.
    """

    kind: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}" if self.kind in _SEEDED else self.kind


def parse_replica(value: object, *, where: str) -> ReplicaSetting | Problem | None:
    """Read `"ulp:1"`, `"reorder:1"`, `"channel:1"` or `"float64"`; None means no replica. The seed is 0 by default."""
    if value is None or isinstance(value, ReplicaSetting):
        return value
    written = _REPLICA.fullmatch(value) if isinstance(value, str) else None
    if written is None:
        what = f"{value!r} is not a replica."
        return Problem(where=where, what=what, fix='Write "ulp:1", "reorder:1", "channel:1" or "float64".')
    kind, seed = written["kind"], written["seed"]
    if kind not in _REPLICAS:
        return Problem.unknown_name(where=where, kind="a replica", found=kind, known=_REPLICAS)
    if seed is not None and kind not in _SEEDED:
        what = f"{value!r} has a seed, but nothing of a {kind} replica is random."
        return Problem(where=where, what=what, fix=f'Write "{kind}".')
    return ReplicaSetting(kind=kind, seed=int(seed or 0))


def checked_replica(value: object, problems: list[Problem]) -> ReplicaSetting | None:
    """The replica as `parse_replica` reads it."""
    replica = parse_replica(value, where=f"record(replica={value!r})")
    if isinstance(replica, Problem):
        problems.append(replica)
        return None
    return replica


def checked_bounds(
    value: object, problems: list[Problem], *, where: str = "record(bounds={!r})", write: str = "bounds={}"
) -> tuple[float, ...]:
    """The bounds of intervals, as they were written: a file may name its columns after them.

    Args:
        value: What the user wrote.
        problems: Extended by what is wrong.
        where: Place where the user wrote it; `{!r}` is the value.
        write: How to write it there; `{}` is the right value.
    """
    found: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]
    place = where.format(value)
    if not all(_is_number(bound) for bound in found):
        fix = f"Write {write.format([-1, 0, 1])}, or leave it out."
        problems.append(Problem(where=place, what="must be a list of finite numbers.", fix=fix))
        return ()
    if any(following <= bound for bound, following in pairwise(found)):
        fix = f"Write {write.format(sorted({*found}))}."
        problems.append(Problem(where=place, what="must ascend, each number once.", fix=fix))
        return ()
    return tuple(found)


def interval_names(bounds: Iterable[float]) -> list[str]:
    """Names of the intervals between bounds: `(-inf, -1]`, `(-1, 0]`, ..., `(1, inf)`. Empty without bounds."""
    texts = [str(bound) for bound in bounds]
    if not texts:
        return []
    inner = [f"({first}, {last}]" for first, last in pairwise(texts)]
    return [f"(-inf, {texts[0]}]", *inner, f"({texts[-1]}, inf)"]


def checked_flag(name: str, value: object, problems: list[Problem], *, where: str = "record({}={!r})") -> bool:
    """A setting that is on or off.

    Args:
        name: Its name.
        value: What the user wrote.
        problems: Extended by what is wrong.
        where: Place where the user wrote it; `{}` is the name and `{!r}` the value.
    """
    if not isinstance(value, bool):
        fix = f"Write {name}=True, or leave it out."
        problems.append(Problem(where=where.format(name, value), what="must be True or False.", fix=fix))
    return bool(value)


def checked_observe(value: object, problems: list[Problem]) -> frozenset[str]:
    """Names of what is observed; None means the default."""
    wanted = OBSERVED_BY_DEFAULT if value is None else listed(value)
    _check_known("observe", wanted, OBSERVABLE, "something to observe", problems)
    if not wanted:
        fix = f"Name some of: {', '.join(OBSERVABLE)}."
        problems.append(Problem(where="record(observe=...)", what="is empty: nothing would be recorded.", fix=fix))
    return frozenset(map(str, wanted))


def checked_detail(value: object, problems: list[Problem]) -> frozenset[str]:
    """Names of what is kept of a tensor: always its summary."""
    wanted = [str(name) for name in listed(value)]
    _check_known("detail", wanted, DETAILS, "a detail", problems)
    return frozenset(("summary", *wanted))


def checked_sample_order(value: object, problems: list[Problem]) -> SampleOrder:
    """The order of the samples."""
    for known in SAMPLE_ORDERS:
        if value == known:
            return known
    _check_known("sample_order", [value], SAMPLE_ORDERS, "an order of samples", problems)
    return "blocks"


def checked_select(value: object, problems: list[Problem]) -> tuple[str, ...]:
    """Patterns over paths of modules and parameters."""
    patterns = listed(value)
    if not all(isinstance(pattern, str) for pattern in patterns):
        what = "must be a pattern over paths of modules and parameters, or a list of them."
        fix = 'Write select="encoder.*", or leave it out to record everything.'
        problems.append(Problem(where=f"record(select={value!r})", what=what, fix=fix))
    return tuple(map(str, patterns))


def checked_operators(value: object, problems: list[Problem]) -> tuple[str, ...]:
    """Patterns over paths of modules; None means no modules."""
    if value is None:
        return ()
    patterns = listed(value)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        what = "must be a pattern over paths of modules, or a list of them."
        fix = 'Write operators="encoder.layers.3", or leave it out to record no operators.'
        problems.append(Problem(where=f"record(operators={value!r})", what=what, fix=fix))
    return tuple(map(str, patterns))


def checked_steps(value: Any, problems: list[Problem]) -> StepSelection:
    """The steps as `parse_steps` reads them."""
    chosen = parse_steps(value, where="record(steps=...)")
    if isinstance(chosen, StepSelection):
        return chosen
    problems.append(chosen)
    return ALL_STEPS


def checked_ranks(value: object, problems: list[Problem]) -> tuple[int, ...] | None:
    """Ranks, ascending; None means all."""
    if value is None:
        return None
    ranks = listed(value)
    if not all(is_whole(rank) and rank >= 0 for rank in ranks):
        what = "must be a rank, or a list of ranks, counted from 0."
        fix = "Write ranks=[0, 1], or leave it out to record all of them."
        problems.append(Problem(where=f"record(ranks={value!r})", what=what, fix=fix))
        return None
    return tuple(sorted(set(ranks)))


def checked_every(value: Any, problems: list[Problem]) -> int:
    """Distance of the steps that are recorded."""
    if is_whole(value) and value >= 1:
        return value
    what, fix = "must be a whole number of steps, at least 1.", "Write every=1 to record every step, or leave it out."
    problems.append(Problem(where=f"record(every={value!r})", what=what, fix=fix))
    return 1


def checked_compact(value: Any, problems: list[Problem]) -> int | None:
    """Distance of the steps that stay whole beside merged ones: 0 if none do; None if no ranks are merged."""
    if value is None or value is False:
        return None
    if value is True:
        return 0
    if is_whole(value) and value >= 1:
        return value
    what = "must be True, or a whole number of steps, at least 1."
    fix = (
        "Write compact=True to merge the ranks of all steps, or compact=100 to keep every hundredth step rank by rank."
    )
    problems.append(Problem(where=f"record(compact={value!r})", what=what, fix=fix))
    return None


def checked_batch_axis(value: object, problems: list[Problem]) -> Mapping[str, int | None]:
    """Batch axes by pattern over paths."""
    if value is None:
        return {}
    axes = {"*": value} if is_whole(value) else value
    if isinstance(axes, Mapping) and all(axis is None or is_whole(axis) for axis in axes.values()):
        return {str(pattern): axis for pattern, axis in axes.items()}
    what = "must be an axis, or axes by pattern over module paths."
    fix = 'Write batch_axis=1, or batch_axis={"encoder.*": 1, "rotary": None}.'
    problems.append(Problem(where=f"record(batch_axis={value!r})", what=what, fix=fix))
    return {}


def _check_known(
    name: str, wanted: Collection[object], known: Collection[str], kind: str, problems: list[Problem]
) -> None:
    where = f"record({name}=...)"
    problems += [
        Problem.unknown_name(where=where, kind=kind, found=str(one), known=known) for one in wanted if one not in known
    ]


def listed(value: object) -> list[Any]:
    """The entries of a list; one thing alone is a list of it."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def is_whole(value: object) -> TypeGuard[int]:
    """True for an integer that is no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
