"""The settings of `traindiff.watch`, checked before anything is attached."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TextIO

from traindiff.core.setting_checks import checked_flag, is_whole, listed
from traindiff.errors import ConfigError, Problem, type_of
from traindiff.observe.torch.nonfinite.origin import Origin

ON_DETECT = ("raise", "warn")

WARNINGS = ("limit", "zeros", "subnormals", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
"""What `watch(warn=...)` may list; see `traindiff explain watch`."""

DEFAULT_WARNINGS = WARNINGS[:3]


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """Checked settings; see `traindiff.watch` for what they mean."""

    frames: int
    trace: frozenset[int]
    abort_after: int | None
    on_detect: str | Callable[[Origin], Any]
    output: str | None
    masks: tuple[str, ...]
    nonfinite: tuple[str, ...]
    warn: frozenset[str]
    keep_inputs: bool
    file: TextIO


def watch_settings(**written: Any) -> WatchSettings:
    """Check the settings of `traindiff.watch`, all of which are given.

    Raises:
        ConfigError: Lists everything that is wrong with them.
    """
    problems: list[Problem] = []
    settings = WatchSettings(**{name: check(written[name], problems) for name, check in SETTINGS.items()})
    if problems:
        raise ConfigError("watch(...)", problems, consequence="nothing was attached to the model")
    return settings


def _frames(value: Any, problems: list[Problem]) -> int:
    if not (is_whole(value) and value >= 1):
        what, fix = "must be a whole number of frames, at least 1.", "Write frames=21, or leave it out."
        problems.append(Problem(where=f"watch(frames={value!r})", what=what, fix=fix))
    return value  # type: ignore[no-any-return]


def _trace(value: object, problems: list[Problem]) -> frozenset[int]:
    steps = listed(value)
    if not all(is_whole(step) and step >= 0 for step in steps):
        what, fix = "must be steps, counted from 0.", "Write trace=(0, 5), or leave it out to trace none."
        problems.append(Problem(where=f"watch(trace={value!r})", what=what, fix=fix))
        return frozenset()
    return frozenset(steps)


def _abort_after(value: Any, problems: list[Problem]) -> int | None:
    if value is not None and not (is_whole(value) and value >= 0):
        what = "must be a step, counted from 0."
        fix = "Write abort_after=3 to stop the training when step 3 has ended, or leave it out."
        problems.append(Problem(where=f"watch(abort_after={value!r})", what=what, fix=fix))
    return value  # type: ignore[no-any-return]


def _on_detect(value: Any, problems: list[Problem]) -> str | Callable[[Origin], Any]:
    if value not in ON_DETECT and not callable(value):
        where, kind = "watch(on_detect=...)", "something to do, nor a function"
        problems.append(Problem.unknown_name(where=where, kind=kind, found=str(value), known=ON_DETECT))
    return value  # type: ignore[no-any-return]


def _output(value: Any, problems: list[Problem]) -> str | None:
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if path is not None and not (isinstance(path, str) and path):
        fix = "Write the directory for what is saved, or None to save nothing."
        problems.append(Problem(where=f"watch(output={value!r})", what="is not a path.", fix=fix))
    return path  # type: ignore[no-any-return]


def _sites(name: str, example: str, value: object, problems: list[Problem]) -> tuple[str, ...]:
    patterns = listed(value)
    if not all(isinstance(pattern, str) for pattern in patterns):
        what = "must be a pattern over sites, or a list of them."
        fix = f'Write {name}=["{example}"]: the path of a module, a space, and the slot.'
        problems.append(Problem(where=f"watch({name}={value!r})", what=what, fix=fix))
    return tuple(map(str, patterns))


def _warn(value: object, problems: list[Problem]) -> frozenset[str]:
    where, kind = "watch(warn=...)", "something to warn of"
    names = listed(value)
    problems += [
        Problem.unknown_name(where=where, kind=kind, found=str(name), known=WARNINGS)
        for name in names
        if name not in WARNINGS
    ]
    return frozenset(map(str, names))


def _file(value: Any, problems: list[Problem]) -> TextIO:
    if value is not None and not hasattr(value, "write"):
        what = f"is {type_of(value)}, which nothing can be written to."
        fix = "Give an open text file, or leave it out for standard error."
        problems.append(Problem(where="watch(file=...)", what=what, fix=fix))
    return sys.stderr if value is None else value


SETTINGS: Mapping[str, Callable[[Any, list[Problem]], Any]] = {
    "frames": _frames, "trace": _trace, "abort_after": _abort_after, "on_detect": _on_detect, "output": _output,
    "masks": partial(_sites, "masks", "* input.attention_mask"),
    "nonfinite": partial(_sites, "nonfinite", "(root) input[0]"), "warn": _warn,
    "keep_inputs": partial(checked_flag, "keep_inputs", where="watch({}={!r})"),
    "file": _file,
}  # fmt: skip
"""All settings of `watch` by name. Each check returns the setting in one form, or appends what is wrong with it."""
