"""A grid of combinations to verify, as a file says it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

from traindiff.errors import ConfigError, Problem, type_of
from traindiff.recipes.asked_setup import AskedSetup
from traindiff.setups.setup import Setup

_TABLES = ("grid", "settings", "exclude")
_OWN = ("engine", "baseline_engine", "nproc", "zero_stage", "offload_device")
_KNOWN = tuple(dict.fromkeys((*_OWN, *(one.name for one in fields(Setup)))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One combination of a grid.

    Attributes:
        varied: What the grid says of it, by setting.
        asked: The setup, what neither grid nor settings say as on the command line.
    """

    varied: Mapping[str, Any]
    asked: AskedSetup

    @property
    def name(self) -> str:
        """The settings that vary: `engine=ddp, dtype=float32`."""
        return ", ".join(f"{name}={value}" for name, value in self.varied.items())


def read_grid(path: Path, base: AskedSetup) -> list[Combination]:
    """The combinations of a grid: every value with every other, without those that are excluded.

    Args:
        path: TOML, or JSON with the same tables: `grid` (a list of values by setting), and if wanted `settings` (a
            value by setting, for all combinations) and `exclude` (a list of tables; a combination that has all values
            of one is left out).
        base: What holds where the file says nothing.

    Raises:
        ConfigError: The file is not there, cannot be read, or says something else; lists all problems.
    """
    content = _content(path)
    problems = [
        Problem.unknown_name(where=name, kind="a table of a grid", found=name, known=_TABLES)
        for name in content
        if name not in _TABLES
    ]
    grid, settings, exclude = content.get("grid", {}), content.get("settings", {}), content.get("exclude", [])
    if not isinstance(grid, Mapping) or not grid:
        fix = 'Write [grid] and below it e.g. engine = ["ddp", "fsdp2"].'
        problems.append(Problem(where="[grid]", what="has nothing to vary.", fix=fix))
        grid = {}
    if not isinstance(exclude, list) or not all(isinstance(one, Mapping) and one for one in exclude):
        fix = 'Write [[exclude]] and below it e.g. engine = "ddp".'
        problems.append(Problem(where="exclude", what="is no list of tables.", fix=fix))
        exclude = []
    for where, table in (("[grid]", grid), ("[settings]", settings), *(("[[exclude]]", one) for one in exclude)):
        problems += [
            Problem.unknown_name(where=f"{where} {name}", kind="a setting of a setup", found=name, known=_KNOWN)
            for name in table
            if name not in _KNOWN
        ]
    problems += [
        Problem(where=f"[grid] {name}", what=f"is {type_of(values)}, not a list of values.", fix=f"Write [{values!r}].")
        for name, values in grid.items()
        if not isinstance(values, list) or not values
    ]
    problems += [
        Problem(where=f"[settings] {name}", what="is in [grid] too.", fix=f"Remove {name} from one of the two.")
        for name in settings
        if name in grid
    ]
    if problems:
        raise ConfigError(str(path), problems)
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    return [
        Combination(varied=varied, asked=_asked(base, {**settings, **varied}))
        for varied in combinations
        if not any(_has_all(one, varied) for one in exclude)
    ]


def _content(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        problem = Problem(where=str(path), what="does not exist.", fix="Give the path of a TOML or JSON file.")
        raise ConfigError("--matrix", [problem]) from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        problem = Problem(where=str(path), what=f"is no {kind} ({error}).", fix=f"Correct it, as {kind}.")
        raise ConfigError("--matrix", [problem]) from None
    return content if isinstance(content, Mapping) else {}


def _has_all(excluded: Mapping[str, Any], varied: Mapping[str, Any]) -> bool:
    return all(varied.get(name) == value for name, value in excluded.items())


def _asked(base: AskedSetup, said: Mapping[str, Any]) -> AskedSetup:
    said = {name: _without_prefix(value) for name, value in said.items()}
    own = {name: value for name, value in said.items() if name in _OWN}
    return replace(base, **own, further={**base.further, **{k: v for k, v in said.items() if k not in _OWN}})


def _without_prefix(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value
