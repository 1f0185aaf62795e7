"""Which rules a run is held against, and by which limits: as the user wrote it, checked before anything is read."""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from traindiff.errors import ConfigError, Problem, type_of
from traindiff.rules import RULES, Rule

Names = str | Iterable[str] | None
"""Names of rules: one, several in one text with commas between them, or several."""

Config = str | os.PathLike[str] | Mapping[str, Mapping[str, float]] | None
"""A TOML file, or what one would hold: limits by the rule's name and the limit's."""

CONSEQUENCE = "nothing was checked"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenRules:
    """What a run is held against.

    Attributes:
        rules: In the order in which they are asked.
        limits: What the user sets in place of their own limits, by the rule's name and the limit's.
    """

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
    """A name that no rule has; there are too many rules to list them all."""
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
        elif isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            fix = f"Write a number, e.g. {name} = {rule.limits[name].default:g}, as it is by default."
            problems.append(Problem(where=where, what=f"is {value!r}, not a number from 0 up.", fix=fix))
        else:
            chosen[name] = float(value)
    return chosen


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        fix = "Give the path of a TOML file with a table [RULE] for each rule whose limits it sets."
        problem = Problem(where="config", what=f"cannot be read: {error.strerror or error}.", fix=fix)
        raise ConfigError(path, [problem], consequence=CONSEQUENCE) from error
    except (ValueError, RecursionError) as error:
        fix = "Write a table [RULE] for each rule, and below it LIMIT = NUMBER."
        problem = Problem(where="config", what=f"is not TOML: {error}.", fix=fix)
        raise ConfigError(path, [problem], consequence=CONSEQUENCE) from error
