"""The configuration file of msprobe's gradient monitor, checked before anything is attached."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traindiff.core.setting_checks import checked_bounds
from traindiff.errors import ConfigError, Problem

TASK = "grad_probe"

_TOP = ("task", "dump_path", "rank", "step", "overwrite", TASK)
_OTHER_TASKS = (
    "level", "enable_dataloader", "async_dump", "precision", "summary_mode", "seed", "is_deterministic",
    "extra_info", "statistics", "tensor", "acc_check", "overflow_check", "run_ut", "free_benchmark", "structure",
    "exception_dump", "nan_analyze", "config_checking",
)  # fmt: skip
"""Entries of the same file that other tasks of msprobe read."""

_OWN = ("grad_level", "param_list", "bounds", "hash")
LEVELS = ("L0", "L1", "L2")
HASHES = ("md5", "fingerprint")

_INT64 = (-(2**63), 2**63 - 1)
_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What is monitored, and where it is written.

    Attributes:
        source: File that it was read from.
        dump_path: Directory of the files.
        ranks: Ranks to monitor; None for all.
        steps: Calls of an optimizer to monitor, as `traindiff.record` takes them; None for all.
        level: `L0`, `L1` or `L2`.
        parameters: Names of parameters to monitor; empty for all.
        bounds: Of the intervals of which `L2` gives shares.
        digest: Which hash `L0` gives: `md5` or `fingerprint`.
        overwrite: Whether the files of an earlier run are replaced; they are refused otherwise.
    """

    source: str
    dump_path: str
    ranks: tuple[range, ...] | None
    steps: str | None
    level: str
    parameters: tuple[str, ...]
    bounds: tuple[float, ...]
    digest: str
    overwrite: bool


def read_configuration(
    path: object, *, task: str | None = None, dump_path: str | None = None, step: object = None
) -> Configuration:
    """Read a configuration file.

    Args:
        path: The file.
        task: Instead of the file's.
        dump_path: Instead of the file's.
        step: Instead of the file's.

    Raises:
        ConfigError: Lists everything that is wrong with it.
    """
    source = str(path)
    instead = {"task": task, "dump_path": dump_path, "step": step}
    found = {**_object(source), **{name: value for name, value in instead.items() if value is not None}}
    problems: list[Problem] = []
    own = found.get(TASK, {})
    if not isinstance(own, Mapping):
        problems.append(Problem(where=f'"{TASK}"', what="must be an object.", fix=f'Write "{TASK}": {{}}.'))
        own = {}
    _check_names(found, own, problems)
    if found.get("task") != TASK:
        what = f"is {found.get('task')!r}; of msprobe's tasks this is the gradient monitor alone."
        problems.append(Problem(where='"task"', what=what, fix=f'Write "task": "{TASK}".'))
    settings = Configuration(
        source=source,
        dump_path=_text("dump_path", found.get("dump_path"), problems),
        ranks=_numbers("rank", found.get("rank"), problems),
        steps=_text_of(_numbers("step", found.get("step"), problems)),
        level=_one_of("grad_level", own.get("grad_level", "L1"), LEVELS, problems),
        parameters=_names(own.get("param_list"), problems),
        bounds=_bounds(own.get("bounds", [-1, 0, 1]), problems),
        digest=_one_of("hash", own.get("hash", "md5"), HASHES, problems),
        overwrite=_flag(found.get("overwrite", False), problems),
    )
    if problems:
        raise ConfigError(source, problems, consequence="nothing is monitored")
    return settings


def _object(source: str) -> Mapping[str, Any]:
    fix = 'Give the path of a JSON file with "task": "grad_probe".'
    try:
        found = json.loads(Path(source).read_text(encoding="utf-8-sig"))
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}."
    except (ValueError, RecursionError) as error:
        what = f"is not JSON: {error}."
    else:
        if isinstance(found, dict):
            return found
        what = "holds no JSON object."
    problem = Problem(where=f"configuration {source}", what=what, fix=fix)
    raise ConfigError("PrecisionDebugger(...)", [problem], consequence="nothing is monitored")


def _check_names(found: Mapping[str, Any], own: Mapping[str, Any], problems: list[Problem]) -> None:
    known = (*_TOP, *_OTHER_TASKS)
    problems += [
        Problem.unknown_name(where=f'"{name}"', kind="an entry", found=name, known=_TOP)
        for name in found
        if name not in known
    ]
    problems += [
        Problem.unknown_name(where=f'"{TASK}", "{name}"', kind="a setting", found=name, known=_OWN)
        for name in own
        if name not in _OWN
    ]


# Each of these returns the checked setting, or appends to `problems` and returns anything of its type.


def _text(name: str, value: object, problems: list[Problem]) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        problems.append(
            Problem(where=f'"{name}"', what=f"is {value!r}, not a path.", fix=f'Write "{name}": "./dump_path".')
        )
    return str(value)


def _one_of(name: str, value: object, known: tuple[str, ...], problems: list[Problem]) -> str:
    if value not in known:
        what = {"grad_level": "a level", "hash": "a hash"}[name]
        where = f'"{TASK}", "{name}"'
        problems.append(Problem.unknown_name(where=where, kind=what, found=str(value), known=known))
    return str(value)


def _flag(value: object, problems: list[Problem]) -> bool:
    if not isinstance(value, bool):
        problems.append(
            Problem(where='"overwrite"', what=f"is {value!r}, not true or false.", fix='Write "overwrite": true.')
        )
    return bool(value)


def _numbers(name: str, value: object, problems: list[Problem]) -> tuple[range, ...] | None:
    """Numbers and ranges of them; None where all are meant."""
    listed = [] if value is None else value
    found: list[range] = []
    wrong = not isinstance(listed, list)
    for one in listed if isinstance(listed, list) else ():
        match = _RANGE.fullmatch(one) if isinstance(one, str) else None
        if match and int(match[1]) <= int(match[2]):
            found.append(range(int(match[1]), int(match[2]) + 1))
        elif isinstance(one, int) and not isinstance(one, bool) and one >= 0:
            found.append(range(one, one + 1))
        else:
            wrong = True
    if wrong:
        what = f"is {value!r}, not a list of numbers from 0 and of ranges."
        problems.append(Problem(where=f'"{name}"', what=what, fix=f'Write "{name}": [0, 1, "4-6"], or [] for all.'))
    return tuple(found) or None


def _text_of(steps: tuple[range, ...] | None) -> str | None:
    """Steps as `traindiff.record` takes them, which may be more than memory could hold one by one."""
    return None if steps is None else ",".join(f"{one.start}-{one.stop - 1}" for one in steps)


def _names(value: object, problems: list[Problem]) -> tuple[str, ...]:
    listed = [] if value is None else value
    if isinstance(listed, list) and all(isinstance(one, str) for one in listed):
        return tuple(listed)
    what = f"is {value!r}, not a list of names of parameters."
    fix = 'Write "param_list": ["fc.weight"], or [] for all.'
    problems.append(Problem(where=f'"{TASK}", "param_list"', what=what, fix=fix))
    return ()


def _bounds(value: object, problems: list[Problem]) -> tuple[float, ...]:
    where = f'"{TASK}", "bounds"'
    found = checked_bounds(value, problems, where=where, write='"bounds": {}')
    beyond = [bound for bound in found if not _INT64[0] <= bound <= _INT64[1]]
    if beyond:
        what = f"holds {beyond[0]!r}, which is beyond the range of int64."
        problems.append(Problem(where=where, what=what, fix='Write "bounds": [-1, 0, 1].'))
    return found
