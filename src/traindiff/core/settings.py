"""The settings of `record`: each is declared once in `RecordSettings`, and its written form in `RecordOptions`.

Signatures, checks, `run.json` and the options of `traindiff run` follow from these two. A new setting is a key of
`RecordOptions`, a field of `RecordSettings`, and a paragraph in the docstring of `record`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import Parameter, signature
from typing import Any, TypedDict, TypeVar, Unpack, get_type_hints

from traindiff.core import setting_checks as checks
from traindiff.core.setting_checks import DETAILS, ReplicaSetting, SampleOrder
from traindiff.core.shards import DeclaredShard, checked_shards
from traindiff.core.steps import StepSelection
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.core.untrusted.demands import ANYTHING, FLAG, NUMBER, TEXT, Demand, listed, mapped, nullable, whole
from traindiff.errors import ConfigError, Problem

MOST_RANKS = 1 << 17
"""Limit for the ranks of a run."""

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class CommonOptions(TypedDict, total=False):
    """Settings as users write them, for every framework. `traindiff.record` documents them."""

    observe: str | Iterable[str] | None
    select: str | Iterable[str]
    detail: str | Iterable[str]
    bounds: Iterable[float]
    steps: str | int | Iterable[int] | None
    ranks: int | Collection[int] | None
    every: int
    batch_axis: int | Mapping[str, int | None] | None
    strict: bool


class RecordOptions(CommonOptions, total=False):
    """Settings as users write them, for torch. `traindiff.record` documents them."""

    sample_order: str
    shards: Iterable[DeclaredShard]
    operators: str | Iterable[str] | None
    evaluation: bool
    run_on_cpu: bool
    compact: bool | int | None
    per_node: bool
    replica: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a setting is written, checked and kept; the metadata of a field of `RecordSettings`.

    Attributes:
        default: As users would write it.
        check: Returns what the user wrote in one form, and appends to a list what is wrong with it.
        to_json: Makes the value of `run.json` from the checked one.
        in_json: Type that a reader of `run.json` demands; None keeps the setting out of it.
        help: Describes the option of `traindiff run`; empty where there is none.
        metavar: Placeholder for the option's value.
        group: Title of the options that it is listed with.
    """

    default: Any
    check: Callable[[Any, list[Problem]], Any]
    to_json: Callable[[Any], Any]
    in_json: Demand | None
    help: str
    metavar: str | None
    group: str


_OBSERVED, _KEPT, _RECORDED = "What is observed", "What is kept of it", "How it is recorded"
"""Titles of the groups of options."""


def _same(value: _T) -> _T:
    return value


def _setting(
    default: object,
    check: Callable[[Any, list[Problem]], _T],
    in_json: Demand | None,
    *,
    to_json: Callable[[_T], Any] = _same,
    help: str = "",  # noqa: A002  as typer calls it
    metavar: str | None = None,
    group: str = _OBSERVED,
) -> _T:
    """Declare a field of `RecordSettings`; see `Setting`."""
    setting = Setting(
        default=default, check=check, to_json=to_json, in_json=in_json, help=help, metavar=metavar, group=group
    )
    return field(default_factory=lambda: check(default, []), metadata={"setting": setting})


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Checked settings of a recording; `traindiff.record` documents them.

    Three are internal. `counts_skipped`: whether a step that the loss scaler skips counts as a step; if not, nothing of
    it is recorded. `last`: a step that is recorded whatever `every` and `steps` say. `main_gradients`: read `main_grad`
    of a parameter before its `.grad`; if parameters have it, follow an optimizer that holds none of the model's
    parameters, too.
    """

    observe: frozenset[str] = _setting(
        None, checks.checked_observe, listed(TEXT), to_json=lambda names: [one for one in OBSERVABLE if one in names],
        metavar="A,B", help="What to observe (traindiff explain observe). All phases, if left out.",
    )  # fmt: skip
    select: tuple[str, ...] = _setting(
        "*", checks.checked_select, listed(TEXT), to_json=list,
        metavar="GLOB", help="Paths of modules and parameters, e.g. 'transformer.h.3.*'. Repeatable.",
    )  # fmt: skip
    detail: frozenset[str] = _setting(
        "summary", checks.checked_detail, listed(TEXT), to_json=lambda names: [one for one in DETAILS if one in names],
        metavar="A,B", group=_KEPT, help="What to keep of a tensor: summary, exponents, signs, md5, tensors.",
    )  # fmt: skip
    bounds: tuple[float, ...] = _setting(
        (), checks.checked_bounds, listed(NUMBER), to_json=list,
        metavar="A,B", group=_KEPT, help="Count elements of gradients between these, e.g. --bounds=-1,0,1.",
    )  # fmt: skip
    steps: StepSelection = _setting(  # noqa: RUF009  makes a field
        None, checks.checked_steps, nullable(TEXT), to_json=lambda steps: steps.text or None,
        metavar="STEPS", group=_KEPT, help='Steps to record, e.g. "0-9,20,30-".',
    )  # fmt: skip
    ranks: tuple[int, ...] | None = _setting(
        None, checks.checked_ranks, nullable(listed(whole(0, MOST_RANKS - 1))),
        to_json=lambda ranks: None if ranks is None else list(ranks),
        metavar="A,B", group=_KEPT, help='Ranks to record, e.g. "0,8".',
    )  # fmt: skip
    every: int = _setting(
        1, checks.checked_every, whole(1), metavar="N", group=_KEPT, help="Record only every n-th step."
    )
    batch_axis: Mapping[str, int | None] = _setting(
        None, checks.checked_batch_axis, mapped(ANYTHING), to_json=dict,
        metavar="[GLOB=]AXIS", group=_RECORDED,
        help="The batch axis: 1 for all tensors, or MODULE=1 or MODULE=none for some. Repeatable.",
    )  # fmt: skip
    sample_order: SampleOrder = _setting(  # noqa: RUF009  makes a field
        "blocks",
        checks.checked_sample_order,
        TEXT,
        metavar="ORDER",
        group=_RECORDED,
        help="How ranks share a batch: blocks or interleaved.",
    )
    shards: tuple[DeclaredShard, ...] = _setting(
        (), checked_shards, listed(TEXT), to_json=lambda shards: list(map(str, shards))
    )
    operators: tuple[str, ...] = _setting(
        None, checks.checked_operators, listed(TEXT), to_json=list,
        metavar="GLOB", help="Modules whose operators are recorded; choose --steps too. Repeatable.",
    )  # fmt: skip
    evaluation: bool = _setting(
        default=False, check=partial(checks.checked_flag, "evaluation"), in_json=FLAG,
        help="Record forward passes without gradients too.",
    )  # fmt: skip
    strict: bool = _setting(
        default=False,
        check=partial(checks.checked_flag, "strict"),
        in_json=None,
        group=_RECORDED,
        help="Raise errors of traindiff's own.",
    )
    run_on_cpu: bool = _setting(
        default=False, check=partial(checks.checked_flag, "run_on_cpu"), in_json=None,
        group=_RECORDED, help="Copy tensors of other devices to the CPU and summarize them there.",
    )  # fmt: skip
    compact: int | None = _setting(
        None, checks.checked_compact, in_json=None, metavar="all|N", group=_KEPT,
        help="Merge ranks beside the training: of all steps, or keep every N-th step rank by rank.",
    )  # fmt: skip
    per_node: bool = _setting(
        default=False, check=partial(checks.checked_flag, "per_node"), in_json=None,
        group=_KEPT, help="Write one file for all ranks of a node.",
    )  # fmt: skip
    replica: ReplicaSetting | None = _setting(  # noqa: RUF009  makes a field
        None, checks.checked_replica, nullable(TEXT), to_json=lambda replica: None if replica is None else str(replica),
        metavar="KIND[:SEED]", group=_RECORDED,
        help="Perturb the training on purpose: ulp:SEED, reorder:SEED, float64.",
    )  # fmt: skip
    counts_skipped: bool = True
    last: int | None = None
    main_gradients: bool = False

    def records(self, step: int) -> bool:
        """True if this step is recorded."""
        return step == self.last or (step % self.every == 0 and step in self.steps)

    def to_json(self) -> dict[str, Any]:
        """The settings as they are written into `run.json`."""
        return {
            name: setting.to_json(getattr(self, name))
            for name, setting in SETTINGS.items()
            if setting.in_json is not None
        }


SETTINGS: Mapping[str, Setting] = {
    one.name: one.metadata["setting"] for one in fields(RecordSettings) if "setting" in one.metadata
}
"""All settings of `record`, by name."""


def record_settings(**options: Unpack[RecordOptions]) -> RecordSettings:
    """Check the settings of `traindiff.record`. Those that are left out have their defaults.

    Raises:
        ConfigError: Lists everything that is wrong with them.
    """
    check_names(options, known=SETTINGS)
    problems: list[Problem] = []
    written: Mapping[str, Any] = options
    settings = RecordSettings(
        **{name: one.check(written[name], problems) for name, one in SETTINGS.items() if name in written}
    )
    if settings.replica is not None and written.get("ranks") is not None:
        problems.append(
            Problem(
                where="record(replica=..., ranks=...)",
                what="would perturb the training on some ranks only, and the ranks would drift apart.",
                fix="Leave ranks out to record the replica on all of them.",
            )
        )
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")
    if "witness" in settings.observe:  # of gradients that are read where the optimizer reads them
        settings = replace(settings, observe=settings.observe | {"grad"})
    if settings.operators:
        return replace(settings, observe=settings.observe | {"operators"})
    return replace(settings, operators=("*",)) if "operators" in settings.observe else settings


def takes_settings(options: type) -> Callable[[_Function], _Function]:
    """Decorator that has `inspect.signature`, and so `help`, show the keys of a TypedDict in place of `**settings`."""
    hints = get_type_hints(options)
    shown = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=one.default, annotation=hints[name])
        for name, one in SETTINGS.items()
        if name in hints
    ]
    return partial(with_parameters, shown=shown)


def with_parameters(function: _Function, shown: Iterable[Parameter], *, eval_str: bool = False) -> _Function:
    """The function, in whose signature these parameters stand in place of `**settings`."""
    own = signature(function, eval_str=eval_str)
    kept = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    function.__signature__ = own.replace(parameters=[*kept, *shown])  # type: ignore[attr-defined]
    return function


_STEPS = 'Write steps="10-19", or steps=range(10, 20), which ends before 20; steps="10-" has no end.'


def check_names(names: Collection[str], *, known: Collection[str], where: str = "record({}=...)") -> None:
    """Refuse settings that do not exist.

    Args:
        names: Settings that the user wrote.
        known: Settings that exist.
        where: Place where the user wrote them; `{}` is the name.

    Raises:
        ConfigError: Some do not exist; near misses are suggested.
    """
    problems = [
        Problem(where=where.format(name), what=f'"{name}" is not a setting.', fix=_STEPS)
        if name in ("start_step", "end_step")
        else Problem.unknown_name(where=where.format(name), kind="a setting", found=name, known=known)
        for name in names
        if name not in known
    ]
    if problems:
        source = f"{where.partition('(')[0]}(...)"
        raise ConfigError(source, problems, consequence="nothing was attached to the model")


def checked_first_step(value: object) -> int:
    """The number of the first step.

    Raises:
        ConfigError: It is no whole number from 0 up.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    problem = Problem(
        where=f"record(first_step={value!r})",
        what="is not the number of a step.",
        fix="Write how many steps were trained before, e.g. first_step=1000, or leave it out.",
    )
    raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")


def recording_path(value: object) -> str:
    """The path of a recording as text.

    Raises:
        ConfigError: It is no path.
    """
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if isinstance(text, str) and text and "\0" not in text:
        return text
    problem = Problem(
        where=f"record(path={value!r})",
        what="is not a path.",
        fix='Write the directory to make first: record("runs/baseline", model, optimizer).',
    )
    raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")
