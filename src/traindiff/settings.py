"""What to record, as the user wrote it, checked before anything is attached."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from traindiff.errors import ConfigError, Problem
from traindiff.site import PHASES
from traindiff.steps import StepSelection, parse_steps

OBSERVABLE = (*PHASES, "grad.micro")
"""What `observe` may list: phases, and `grad.micro`, each micro-batch's share of a gradient."""

DETAILS = ("summary",)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings:
    """Checked settings of a recording; see `traindiff.record` for what they mean."""

    observe: frozenset[str]
    select: tuple[str, ...]
    detail: str
    steps: StepSelection
    ranks: tuple[int, ...] | None
    every: int
    batch_axis: Mapping[str, int | None]
    evaluation: bool
    strict: bool

    def records(self, step: int) -> bool:
        """Whether this step is recorded."""
        return step % self.every == 0 and step in self.steps

    def to_json(self) -> dict[str, Any]:
        """The settings as they are written into `run.json`."""
        return {
            "observe": [name for name in OBSERVABLE if name in self.observe],
            "select": list(self.select),
            "detail": self.detail,
            "steps": self.steps.text or None,
            "ranks": None if self.ranks is None else list(self.ranks),
            "every": self.every,
            "batch_axis": dict(self.batch_axis),
            "evaluation": self.evaluation,
        }


def record_settings(
    *,
    observe: str | Iterable[str] | None,
    select: str | Iterable[str],
    detail: str,
    steps: str | int | Iterable[int] | None,
    ranks: int | Collection[int] | None,
    every: int,
    batch_axis: int | Mapping[str, int | None] | None,
    evaluation: bool,
    strict: bool,
) -> RecordSettings:
    """Check the settings of `traindiff.record`.

    Raises:
        ConfigError: Lists everything that is wrong with them.
    """
    problems: list[Problem] = []
    wanted = [observe] if isinstance(observe, str) else list(PHASES if observe is None else observe)
    problems += [
        Problem.unknown_name(
            where="record(observe=...)", kind="something to observe", found=str(name), known=OBSERVABLE
        )
        for name in wanted
        if name not in OBSERVABLE
    ]
    if not wanted:
        problems.append(
            Problem(
                where="record(observe=...)",
                what="is empty, so nothing would be recorded.",
                fix=f"Name some of: {', '.join(OBSERVABLE)}.",
            )
        )
    if detail not in DETAILS:
        problems.append(
            Problem.unknown_name(
                where="record(detail=...)", kind="a level of detail", found=detail, known=DETAILS
            )
        )
    if not _is_whole(every) or every < 1:
        problems.append(
            Problem(
                where=f"record(every={every!r})",
                what="must be a whole number of steps, at least 1.",
                fix="Write every=1 to record every step, or leave it out.",
            )
        )
    chosen = parse_steps(steps, where="record(steps=...)")
    if isinstance(chosen, Problem):
        problems.append(chosen)
        chosen = StepSelection()
    rank_list = [ranks] if _is_whole(ranks) else ranks
    if rank_list is not None and not (
        isinstance(rank_list, Collection) and all(_is_whole(rank) and rank >= 0 for rank in rank_list)
    ):
        problems.append(
            Problem(
                where=f"record(ranks={ranks!r})",
                what="must be a rank or a list of ranks.",
                fix="Write ranks=[0, 1], or leave it out to record all of them.",
            )
        )
        rank_list = None
    axes = {"*": batch_axis} if _is_whole(batch_axis) else batch_axis or {}
    if not isinstance(axes, Mapping) or not all(axis is None or _is_whole(axis) for axis in axes.values()):
        problems.append(
            Problem(
                where=f"record(batch_axis={batch_axis!r})",
                what="must be an axis, or axes by pattern over module paths.",
                fix='Write batch_axis=1, or batch_axis={"encoder.*": 1, "rotary": None}.',
            )
        )
        axes = {}
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")
    return RecordSettings(
        observe=frozenset(wanted),
        select=(select,) if isinstance(select, str) else tuple(select),
        detail=detail,
        steps=chosen,
        ranks=None if rank_list is None else tuple(sorted(set(rank_list))),
        every=every,
        batch_axis=axes,
        evaluation=evaluation,
        strict=strict,
    )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
