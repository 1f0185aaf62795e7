"""The rules and limits that the user chose, checked before anything is read."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from traindiff.analyse.rules import RULES, Rule
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, Problem, type_of

Names = str | Iterable[str] | None
"""Names of rules: one, several in one text with commas between them, or several."""

Config = str | os.PathLike[str] | Mapping[str, Mapping[str, float]] | None
"""A TOML file or its content: limits by the rule's name and the limit's."""

CONSEQUENCE = "nothing was checked"

MOST_CONFIG_BYTES = 1 << 14
"""Largest size of a file of limits: all limits of all rules take 4 kB. Parsing TOML may take the square of its size."""

_LONGEST_SAID = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRules:
    """The rules to ask, in order, and the user's limits by the rule's name and the limit's."""

    rules: tuple[type[Rule], ...] = RULES
    limits: Mapping[str, Mapping[str, float]]


def chosen_rules(rules: Names = None, skip: Names = None, config: Config = None) -> ChosenRules:
    """The rules that a user asks for, or all of them.

    Args:
        rules: Those to ask; None for all.
        skip: Those to leave out.
        config: Limits in place of their own.

    Raises:
        ConfigError: A name or a value is wrong, or no rule is left. Lists everything that is wrong.
    """
    known = {rule.name: rule for rule in RULES}
    problems: list[Problem] = []
    wanted = _names(rules, known, where="rules", problems=problems)
    left_out = _names(skip, known, where="skip", problems=problems)
    chosen = tuple(
        rule for name, rule in known.items() if (wanted is None or name in wanted) and name not in (left_out or ())
    )
    if not problems and not chosen:
        fix = "Write neither to ask all rules, or name a rule in one of them only."
        problems.append(Problem(where="rules and skip", what="leave no rule to ask.", fix=fix))
    if problems:
        raise ConfigError("check(...)", problems, consequence=CONSEQUENCE)
    return ChosenRules(rules=chosen, limits=_limits(config, known))


def _names(
    given: Names, known: Mapping[str, type[Rule]], *, where: str, problems: list[Problem]
) -> frozenset[str] | None:
    if given is None:
        return None
    try:
        names = given.split(",") if isinstance(given, str) else [str(one) for one in given]
    except TypeError:
        fix = 'Write names with commas between them, e.g. "non-finite,spike".'
        problems.append(Problem(where=where, what=f"is {type_of(given)}, not names of rules.", fix=fix))
        return None
    names = [name.strip() for name in names]
    problems += [_no_rule(name, known, where=where) for name in names if name not in known]
    return frozenset(names)


def _no_rule(name: str, known: Mapping[str, type[Rule]], *, where: str) -> Problem:
    """The problem of an unknown name; there are too many rules to list them all."""
    nearest = get_close_matches(name, known, n=1)
    suggestion = f'Did you mean "{nearest[0]}"? ' if nearest else ""
    fix = f"{suggestion}traindiff check --list lists all rules."
    return Problem(where=where, what=f'"{name}" is not a rule.', fix=fix)


def _limits(config: Config, known: Mapping[str, type[Rule]]) -> dict[str, dict[str, float]]:
    """Limits that the user sets, checked."""
    if config is None:
        return {}
    source = "check(config=...)"
    found: Mapping[str, Any]
    if isinstance(config, Mapping):
        found = config
    else:
        source = os.fspath(config)
        found = _read(source)
    problems: list[Problem] = []
    limits: dict[str, dict[str, float]] = {}
    for name, values in found.items():
        if name not in known:
            problems.append(_no_rule(str(name), known, where=f"[{name}]"))
        elif not isinstance(values, Mapping):
            fix = f"Write a table: [{name}], and below it LIMIT = NUMBER."
            problems.append(Problem(where=str(name), what=f"is {type_of(values)}, not limits of a rule.", fix=fix))
        else:
            limits[name] = _limits_of(known[name], values, problems)
    if problems:
        raise ConfigError(source, problems, consequence=CONSEQUENCE)
    return limits


def _limits_of(rule: type[Rule], values: Mapping[str, Any], problems: list[Problem]) -> dict[str, float]:
    chosen: dict[str, float] = {}
    for name, value in values.items():
        where = f"[{rule.name}] {name}"
        if name not in rule.limits and not rule.limits:
            fix = f"Take it out; traindiff check --skip {rule.name} leaves out the rule."
            problems.append(Problem(where=where, what="is a limit of a rule that has none.", fix=fix))
        elif name not in rule.limits:
            kind = f"a limit of {rule.name}"
            problems.append(Problem.unknown_name(where=where, kind=kind, found=name, known=rule.limits))
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
            fix = f"Write a number, e.g. {name} = {rule.limits[name].default:g}, as it is by default."
            problems.append(Problem(where=where, what=f"is {_said(value)}, not a number from 0 up.", fix=fix))
        else:
            chosen[name] = float(value)
    return chosen


def _said(value: Any) -> str:
    """A value as a message quotes it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python refuses to print huge integers
        return type_of(value)
    return text if len(text) <= _LONGEST_SAID else f"{text[:_LONGEST_SAID]}..."


def _read(path: str) -> dict[str, Any]:
    def refuse(_: str, what: str) -> ConfigError:
        fix = "Give the path of a TOML file with a table [RULE] for each rule whose limits it sets."
        return ConfigError(
            path, [Problem(where="config", what=f"cannot be read: {what}.", fix=fix)], consequence=CONSEQUENCE
        )

    try:
        resolved = Path(path).resolve()
        data = Folder.of(resolved.parent, refuse=refuse).read(resolved.name, limit=MOST_CONFIG_BYTES)
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise refuse(path, f"it cannot be opened ({getattr(error, 'strerror', None) or error})") from None
    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        fix = "Write a table [RULE] for each rule, and below it LIMIT = NUMBER."
        problem = Problem(where="config", what=f"is not TOML: {error}.", fix=fix)
        raise ConfigError(path, [problem], consequence=CONSEQUENCE) from error
