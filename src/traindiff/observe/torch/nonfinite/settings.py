"""What `traindiff.watch` was asked for, checked before anything is attached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TextIO

from traindiff.core.setting_checks import checked_flag
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.torch.nonfinite.origin import Origin

ON_DETECT = ("raise", "warn")

SIGNS = ("limit", "zeros", "subnormals", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""What `watch(warn=...)` may list; see docs/watch.md."""

DEFAULT_SIGNS = SIGNS[:3]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Checked settings; see `traindiff.watch` for what they mean."""

    frames: int
    trace: frozenset[int]
    abort_after: int | None
    on_detect: str | Callable[[Origin], Any]
    output: str | None
    masks: tuple[str, ...]
    warn: frozenset[str]
    keep_inputs: bool
    file: TextIO


def watch_settings(
    *,
    frames: object,
    trace: object,
    abort_after: object,
    on_detect: object,
    output: object,
    masks: object,
    warn: object,
    keep_inputs: object,
    file: object,
) -> WatchSettings:
    """Check the settings of `traindiff.watch`.

    Raises:
        ConfigError: Lists everything that is wrong with them.
    """
    problems: list[Problem] = []
    settings = WatchSettings(
        frames=_frames(frames, problems),
        trace=_trace(trace, problems),
        abort_after=_abort_after(abort_after, problems),
        on_detect=_on_detect(on_detect, problems),
        output=_output(output, problems),
        masks=_masks(masks, problems),
        warn=_warn(warn, problems),
        keep_inputs=checked_flag("keep_inputs", keep_inputs, problems, where="watch({}={!r})"),
        file=_file(file, problems),
    )
    if problems:
        raise ConfigError("watch(...)", problems, consequence="nothing was attached to the model")
    return settings


# Each of these returns the checked setting, or appends to `problems` and returns anything of its type.


def _frames(value: object, problems: list[Problem]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    problems.append(
        Problem(
            where=f"watch(frames={value!r})",
            what="must be a whole number of frames, at least 1.",
            fix="Write frames=21, or leave it out.",
        )
    )
    return 1


def _trace(value: object, problems: list[Problem]) -> frozenset[int]:
    steps = [value] if isinstance(value, int) else list(value) if isinstance(value, Iterable) else [None]
    if all(isinstance(step, int) and not isinstance(step, bool) and step >= 0 for step in steps):
        return frozenset(steps)
    problems.append(
        Problem(
            where=f"watch(trace={value!r})",
            what="must be steps, counted from 0.",
            fix="Write trace=(0, 5), or leave it out to trace none.",
        )
    )
    return frozenset()


def _abort_after(value: object, problems: list[Problem]) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    problems.append(
        Problem(
            where=f"watch(abort_after={value!r})",
            what="must be a step, counted from 0.",
            fix="Write abort_after=3 to stop the training when step 3 has ended, or leave it out.",
        )
    )
    return None


def _on_detect(value: Any, problems: list[Problem]) -> str | Callable[[Origin], Any]:
    if value in ON_DETECT or callable(value):
        return value  # type: ignore[no-any-return]
    problems.append(
        Problem.unknown_name(
            where="watch(on_detect=...)", kind="something to do, nor a function", found=str(value), known=ON_DETECT
        )
    )
    return "raise"


def _output(value: object, problems: list[Problem]) -> str | None:
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if text is None or (isinstance(text, str) and text):
        return text
    problems.append(
        Problem(
            where=f"watch(output={value!r})",
            what="is not a path.",
            fix="Write the directory for what is saved, or None to save nothing.",
        )
    )
    return None


def _masks(value: object, problems: list[Problem]) -> tuple[str, ...]:
    patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    if not all(isinstance(pattern, str) for pattern in patterns):
        problems.append(
            Problem(
                where=f"watch(masks={value!r})",
                what="must be a pattern over sites, or a list of them.",
                fix='Write masks=["* input.attention_mask"]: the path of a module, a space, and the slot.',
            )
        )
    return tuple(map(str, patterns))


def _warn(value: object, problems: list[Problem]) -> frozenset[str]:
    listed = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    problems += [
        Problem.unknown_name(where="watch(warn=...)", kind="something to warn of", found=str(name), known=SIGNS)
        for name in listed
        if name not in SIGNS
    ]
    return frozenset(map(str, listed))


def _file(value: Any, problems: list[Problem]) -> TextIO:
    if value is None:
        return sys.stderr
    if not hasattr(value, "write"):
        problems.append(
            Problem(
                where="watch(file=...)",
                what=f"is {type_of(value)}, which nothing can be written to.",
                fix="Give an open text file, or leave it out for standard error.",
            )
        )
    return value  # type: ignore[no-any-return]
