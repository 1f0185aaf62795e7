"""What to record, as the user wrote it, checked before anything is attached."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeGuard

from traindiff.core.shards import DeclaredShard, checked_shards
from traindiff.core.steps import ALL_STEPS, StepSelection, parse_steps
from traindiff.core.summary import DETAILS
from traindiff.core.tap_registry import OBSERVABLE, OBSERVED_BY_DEFAULT
from traindiff.errors import ConfigError, Problem

SEEDED = ("ulp", "reorder")
"""Kinds of replica that draw from a seed."""

KINDS = (*SEEDED, "float64")

_WRITTEN = re.compile(r"(?P<kind>[^:]*)(:(?P<seed>[0-9]{1,18}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetting:
    """How a training is perturbed within rounding.

    Attributes:
        kind: One of `KINDS`.
        seed: Which of all such perturbations; 0 for `float64`, which has but one.
    """

    kind: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}" if self.kind in SEEDED else self.kind


def parse_replica(value: object, *, where: str) -> ReplicaSetting | Problem | None:
    """Read `"ulp:1"`, `"reorder:1"` or `"float64"`; None means no replica. Without a seed, the seed is 0."""
    if value is None or isinstance(value, ReplicaSetting):
        return value
    written = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    if written is None:
        what = f"{value!r} is not a replica."
        return Problem(where=where, what=what, fix='Write "ulp:1", "reorder:1" or "float64".')
    kind, seed = written["kind"], written["seed"]
    if kind not in KINDS:
        return Problem.unknown_name(where=where, kind="a replica", found=kind, known=KINDS)
    if seed is not None and kind not in SEEDED:
        what = f"{value!r} has a seed, but nothing of a {kind} replica is random."
        return Problem(where=where, what=what, fix=f'Write "{kind}".')
    return ReplicaSetting(kind=kind, seed=int(seed or 0))


def checked_replica(value: object, *, ranks: object, problems: list[Problem]) -> ReplicaSetting | None:
    """The replica that the user asked for; appends to `problems` what is wrong with it."""
    replica = parse_replica(value, where=f"record(replica={value!r})")
    if isinstance(replica, Problem):
        problems.append(replica)
        return None
    if replica is not None and ranks is not None:
        problems.append(
            Problem(
                where="record(replica=..., ranks=...)",
                what="would perturb the training on some ranks only, and the ranks would drift apart.",
                fix="Leave ranks out to record the replica on all of them.",
            )
        )
    return replica


def checked_bounds(
    value: object, problems: list[Problem], *, where: str, write: str = "bounds={}"
) -> tuple[float, ...]:
    """The bounds as numbers; appends to `problems` where they are none.

    Args:
        value: What the user wrote.
        problems: What is wrong so far.
        where: Where it was written; `{!r}` is the value.
        write: How to write it there; `{}` is what.
    """
    found: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, (str, bytes)) else [value]
    place = where.format(value)
    if not all(_is_number(bound) for bound in found):
        problems.append(
            Problem(
                where=place,
                what="must be a list of finite numbers.",
                fix=f"Write {write.format([-1, 0, 1])}, or leave it out.",
            )
        )
        return ()
    if any(following <= bound for bound, following in pairwise(found)):
        ascending = sorted({*found})
        problems.append(
            Problem(where=place, what="must ascend, each number once.", fix=f"Write {write.format(ascending)}.")
        )
        return ()
    return tuple(found)  # as they were written: a file may name its columns after them


def interval_names(bounds: Iterable[float]) -> list[str]:
    """`(-inf, -1]`, `(-1, 0]`, ..., `(1, inf)`: what the intervals are called. None without bounds."""
    texts = [str(bound) for bound in bounds]
    if not texts:
        return []
    inner = [f"({first}, {last}]" for first, last in pairwise(texts)]
    return [f"(-inf, {texts[0]}]", *inner, f"({texts[-1]}, inf)"]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


SampleOrder = Literal["blocks", "interleaved"]
"""How data-parallel ranks share the samples of a global batch: each a block of them, or one each in turn."""

SAMPLE_ORDERS: tuple[SampleOrder, ...] = ("blocks", "interleaved")

_STEPS = 'Write steps="10-19", or steps=range(10, 20), which ends before 20; steps="10-" has no end.'


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Checked settings of a recording; see `traindiff.record` for what they mean.

    Of no meaning there is `counts_skipped`: whether what a loss scaler leaves out is a step like any other. If not,
    nothing of it is recorded.
    """

    observe: frozenset[str]
    select: tuple[str, ...]
    detail: frozenset[str]
    bounds: tuple[float, ...]
    steps: StepSelection
    ranks: tuple[int, ...] | None
    every: int
    batch_axis: Mapping[str, int | None]
    sample_order: SampleOrder
    shards: tuple[DeclaredShard, ...]
    operators: tuple[str, ...]
    evaluation: bool
    strict: bool
    run_on_cpu: bool
    replica: ReplicaSetting | None
    counts_skipped: bool = True

    def records(self, step: int) -> bool:
        """Whether this step is recorded."""
        return step % self.every == 0 and step in self.steps

    def to_json(self) -> dict[str, Any]:
        """The settings as they are written into `run.json`."""
        return {
            "observe": [name for name in OBSERVABLE if name in self.observe],
            "select": list(self.select),
            "detail": [name for name in DETAILS if name in self.detail],
            "bounds": list(self.bounds),
            "steps": self.steps.text or None,
            "ranks": None if self.ranks is None else list(self.ranks),
            "every": self.every,
            "batch_axis": dict(self.batch_axis),
            "sample_order": self.sample_order,
            "shards": [str(one) for one in self.shards],
            "operators": list(self.operators),
            "evaluation": self.evaluation,
            "replica": None if self.replica is None else str(self.replica),
        }


def record_settings(
    *,
    observe: str | Iterable[str] | None,
    select: str | Iterable[str],
    detail: str | Iterable[str],
    steps: str | int | Iterable[int] | None,
    ranks: int | Collection[int] | None,
    every: int,
    batch_axis: int | Mapping[str, int | None] | None,
    sample_order: str,
    evaluation: bool,
    strict: bool,
    replica: object,
    shards: object = (),
    bounds: object = (),
    run_on_cpu: bool = False,
    operators: object = None,
) -> RecordSettings:
    """Check the settings of `traindiff.record`.

    Raises:
        ConfigError: Lists everything that is wrong with them.
    """
    problems: list[Problem] = []
    observed = _observe(observe, problems)
    if operators is not None:
        observed |= {"operators"}
    settings = RecordSettings(
        observe=observed,
        select=_select(select, problems),
        detail=_detail(detail, problems),
        bounds=checked_bounds(bounds, problems, where="record(bounds={!r})"),
        steps=_steps(steps, problems),
        ranks=_ranks(ranks, problems),
        every=_every(every, problems),
        batch_axis=_batch_axis(batch_axis, problems),
        sample_order=_sample_order(sample_order, problems),
        shards=checked_shards(shards, problems),
        operators=_operators("*" if operators is None else operators, problems) if "operators" in observed else (),
        evaluation=checked_flag("evaluation", evaluation, problems),
        strict=checked_flag("strict", strict, problems),
        run_on_cpu=checked_flag("run_on_cpu", run_on_cpu, problems),
        replica=checked_replica(replica, ranks=ranks, problems=problems),
    )
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")
    return settings


def checked_flag(name: str, value: object, problems: list[Problem], *, where: str = "record({}={!r})") -> bool:
    """A setting that is on or off; extends `problems` where it is neither.

    Args:
        name: Its name.
        value: What the user wrote.
        problems: Extended by what is wrong.
        where: Where the user wrote it; `{}` is the name and `{!r}` the value.
    """
    if not isinstance(value, bool):
        fix = f"Write {name}=True, or leave it out."
        problems.append(Problem(where=where.format(name, value), what="must be True or False.", fix=fix))
    return bool(value)


def check_names(unknown: Collection[str], *, known: Collection[str], where: str = "record({}=...)") -> None:
    """Refuse settings of `traindiff.record` that there are not.

    Args:
        unknown: Their names.
        known: Names of the settings that there are.
        where: Where the user wrote them; `{}` is the name.

    Raises:
        ConfigError: There is one.
    """
    problems = [
        Problem(where=where.format(name), what=f'"{name}" is not a setting.', fix=_STEPS)
        if name in ("start_step", "end_step")
        else Problem.unknown_name(where=where.format(name), kind="a setting", found=name, known=known)
        for name in unknown
    ]
    if problems:
        source = f"{where.partition('(')[0]}(...)"
        raise ConfigError(source, problems, consequence="nothing was attached to the model")


def recording_path(value: object) -> str:
    """The path of a recording as text.

    Raises:
        ConfigError: It is no path.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if isinstance(text, str) and text and "\0" not in text:
        return text
    problem = Problem(
        where=f"record(path={value!r})", what="is not a path.", fix='Write the directory to make, e.g. "runs/baseline".'
    )
    raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")


# Each of these returns the checked setting, or appends to `problems` and returns anything of its type.


def _observe(value: object, problems: list[Problem]) -> frozenset[str]:
    wanted = OBSERVED_BY_DEFAULT if value is None else _listed(value)
    where = "record(observe=...)"
    problems += [
        Problem.unknown_name(where=where, kind="something to observe", found=str(name), known=OBSERVABLE)
        for name in wanted
        if name not in OBSERVABLE
    ]
    if not wanted:
        fix = f"Name some of: {', '.join(OBSERVABLE)}."
        problems.append(Problem(where=where, what="is empty: nothing would be recorded.", fix=fix))
    return frozenset(map(str, wanted))


def _select(value: object, problems: list[Problem]) -> tuple[str, ...]:
    patterns = _listed(value)
    if not all(isinstance(pattern, str) for pattern in patterns):
        problems.append(
            Problem(
                where=f"record(select={value!r})",
                what="must be a pattern over paths of modules and parameters, or a list of them.",
                fix='Write select="encoder.*", or leave it out to record everything.',
            )
        )
    return tuple(map(str, patterns))


def _operators(value: object, problems: list[Problem]) -> tuple[str, ...]:
    patterns = _listed(value)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        problems.append(
            Problem(
                where=f"record(operators={value!r})",
                what="must be a pattern over paths of modules, or a list of them.",
                fix='Write operators="encoder.layers.3", or leave it out to record no operators.',
            )
        )
    return tuple(map(str, patterns))


def _detail(value: object, problems: list[Problem]) -> frozenset[str]:
    wanted = [str(name) for name in _listed(value)]
    problems += [
        Problem.unknown_name(where="record(detail=...)", kind="a detail", found=name, known=DETAILS)
        for name in wanted
        if name not in DETAILS
    ]
    return frozenset(("summary", *wanted))


def _steps(value: str | int | Iterable[int] | None, problems: list[Problem]) -> StepSelection:
    chosen = parse_steps(value, where="record(steps=...)")
    if isinstance(chosen, StepSelection):
        return chosen
    problems.append(chosen)
    return ALL_STEPS


def _ranks(value: object, problems: list[Problem]) -> tuple[int, ...] | None:
    if value is None:
        return None
    ranks = _listed(value)
    if not all(_is_whole(rank) and rank >= 0 for rank in ranks):
        problems.append(
            Problem(
                where=f"record(ranks={value!r})",
                what="must be a rank, or a list of ranks, counted from 0.",
                fix="Write ranks=[0, 1], or leave it out to record all of them.",
            )
        )
        return None
    return tuple(sorted(set(ranks)))


def _every(value: int, problems: list[Problem]) -> int:
    if not _is_whole(value) or value < 1:
        problems.append(
            Problem(
                where=f"record(every={value!r})",
                what="must be a whole number of steps, at least 1.",
                fix="Write every=1 to record every step, or leave it out.",
            )
        )
    return value


def _batch_axis(value: object, problems: list[Problem]) -> Mapping[str, int | None]:
    if value is None:
        return {}
    axes = {"*": value} if _is_whole(value) else value
    if isinstance(axes, Mapping) and all(axis is None or _is_whole(axis) for axis in axes.values()):
        return {str(pattern): axis for pattern, axis in axes.items()}
    problems.append(
        Problem(
            where=f"record(batch_axis={value!r})",
            what="must be an axis, or axes by pattern over module paths.",
            fix='Write batch_axis=1, or batch_axis={"encoder.*": 1, "rotary": None}.',
        )
    )
    return {}


def _sample_order(value: str, problems: list[Problem]) -> SampleOrder:
    for known in SAMPLE_ORDERS:
        if value == known:
            return known
    where = "record(sample_order=...)"
    problems.append(
        Problem.unknown_name(where=where, kind="an order of samples", found=str(value), known=SAMPLE_ORDERS)
    )
    return "blocks"


def _listed(value: object) -> list[Any]:
    """What the user listed; one thing alone is a list of it."""
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)
