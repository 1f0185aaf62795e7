"""Defaults of options, from `traindiff.toml` or from `[tool.traindiff]` in `pyproject.toml`.

Such a file may come with recordings or code of others. So it holds no arguments, and nothing that says what is written,
sent or run: a file that happens to lie in a directory changes how things are judged and shown, and this is said.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from traindiff.core.site import printable
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, Problem, TraindiffError, type_of

OWN, SHARED = "traindiff.toml", "pyproject.toml"
"""Names of files of settings. In one directory, the first one counts."""

MOST_BYTES = 1 << 18
"""Largest size of such a file."""

NEVER = frozenset({
    "output", "html", "png", "pictures", "propose", "junit", "webhook", "alert", "overwrite", "compact", "open",
    "candidate", "matrix", "run", "fresh", "replica", "tour", "device", "seconds", "memory", "list", "show-settings",
    "help",
})  # fmt: skip
"""Options that are given on the command line only: what is written, replaced, sent or run, also with what
perturbation (`replica`), and the limits of `rerun`.

So is `-m`, like every option whose name is one letter.
"""

_PATHS = frozenset({"noise", "map", "accept", "config"})
"""Options that name files. In a file of settings, these are relative to its directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """A file of settings.

    Attributes:
        path: Its path.
        table: Where the settings are in it: empty, or `tool.traindiff`.
        content: The settings: by option for all commands that have it, and a table of options for single commands.
    """

    path: str
    table: str
    content: Mapping[str, Any]

    def place(self, command: str = "") -> str:
        """A table of the file, as people find it."""
        table = ".".join(filter(None, (self.table, command)))
        return f"{self.path} [{table}]" if table else self.path


@dataclass(frozen=True, slots=True, kw_only=True)
class Default:
    """The default of one option of one command.

    Attributes:
        value: As the command line would be given it: a text, texts, or a flag.
        place: The table that says so.
    """

    value: Any
    place: str


def find_settings(directory: Path) -> SettingsFile | None:
    """The file of settings in this directory, or in the nearest one above that has any; None if there is none.

    Raises:
        ConfigError: It cannot be read, or is not TOML.
    """
    for folder in (directory, *directory.parents):
        for name in (OWN, SHARED):
            path = folder / name
            if not path.is_file():
                continue
            content = _content(path)
            if name == OWN:
                return SettingsFile(path=_shown(path), table="", content=content)
            tool = content.get("tool")
            own = tool.get("traindiff") if isinstance(tool, dict) else None
            if isinstance(own, dict):
                return SettingsFile(path=_shown(path), table="tool.traindiff", content=own)
    return None


def _shown(path: Path) -> str:
    here = Path.cwd()
    return printable(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _content(path: Path) -> Mapping[str, Any]:
    def refuse(_: str, what: str) -> TraindiffError:
        return _unreadable(path, f"cannot be read: {what}.")

    data = Folder.of(path.parent, refuse=refuse).read(path.name, limit=MOST_BYTES)
    if path.name == SHARED and b"traindiff" not in data:
        return {}
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _unreadable(path, f"is not TOML: {error}.") from None


def _unreadable(path: Path, what: str) -> ConfigError:
    fix = "Mend or remove the file, or run traindiff in another directory."
    return ConfigError("settings", [Problem(where=_shown(path), what=what, fix=fix)])


def defaults_of(file: SettingsFile, commands: Mapping[str, Any], wanted: str) -> dict[str, Default]:
    """The defaults of one command, by the names of its parameters.

    Args:
        file: The file of settings.
        commands: All commands of traindiff by name, as typer declares them.
        wanted: Name of the command.

    Raises:
        ConfigError: The file has an unknown or misspelt key, or a value of another kind, for any of the commands.
    """
    options = {name: own for name, command in commands.items() if (own := dict(_options(command)))}
    everywhere = {option for own in options.values() for option in own}
    problems: list[Problem] = []
    found: dict[str, Default] = {}
    for key, value in file.content.items():
        name = key.replace("_", "-")
        if key in options and isinstance(value, dict):
            for below, one in value.items():
                _read(file, key, below, one, options[key], problems, found if key == wanted else {})
        elif name in everywhere:
            having = {command: some for command, some in options.items() if name in some}
            if len({_kind(some[name]) for some in having.values()}) > 1:
                what = "means different things to different commands."
                table = ".".join(filter(None, (file.table, next(iter(having)))))
                fix = f"Write it in the table of a command, e.g. [{table}]."
                problems.append(Problem(where=f"{file.place()} {printable(key)}", what=what, fix=fix))
                continue
            for command, some in having.items():
                mine: dict[str, Default] = {}
                before = len(problems)
                _read(file, "", key, value, some, problems, mine)
                if len(problems) > before:
                    break
                if command == wanted:
                    found = {**mine, **found}
        else:
            problems.append(_unknown(file, "", key, everywhere | options.keys()))
    if problems:
        raise ConfigError(file.path, problems)
    return found


def _read(
    file: SettingsFile, command: str, key: str, value: Any, options: Mapping[str, Any], problems: list[Problem],
    into: dict[str, Default],
) -> None:  # fmt: skip
    """Check one setting, and put it into the defaults."""
    name = key.replace("_", "-")
    if name not in options:
        problems.append(_unknown(file, command, key, options))
        return
    option, place = options[name], file.place(command)
    try:
        text = _as_written(option, value)
        option.process_value(_context_of(option), text)
    except TypeError as error:
        what = str(error)
    except typer.BadParameter as error:
        what = f"cannot be used: {error.message}"
    else:
        if name in _PATHS:
            text = _relative(file, text)
        into[option.name] = Default(value=text, place=place)
        return
    shown = printable(repr(value))[:80]
    fix = f"See traindiff {command or '...'} --help for what --{name} takes."
    problems.append(Problem(where=f"{place} {printable(key)} = {shown}", what=what, fix=fix))


def _context_of(option: Any) -> Any:
    """A context in which an option is read, of a command that has nothing else."""
    command: Any = TyperCommand(name="traindiff", params=[option])
    return command.context_class(command)


def _as_written(option: Any, value: Any) -> Any:
    """The value as the command line would be given it.

    Raises:
        TypeError: It is of another kind.
    """
    if option.is_flag:
        if isinstance(value, bool):
            return value
        raise TypeError(f"is {type_of(value)}; it must be true or false.")
    if option.multiple:
        values = value if isinstance(value, list) else [value]
        return [_text(one) for one in values]
    if isinstance(value, list) and option.metavar == "A,B":
        return ",".join(map(_text, value))
    return _text(value)


def _text(value: Any) -> str:
    if isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return str(value)
    raise TypeError(f"is {type_of(value)}; it must be a text or a number.")


def _relative(file: SettingsFile, text: Any) -> Any:
    if isinstance(text, list):
        return [_relative(file, one) for one in text]
    beside = Path(file.path).parent / text
    return str(beside) if "://" not in text and not os.path.isabs(text) and beside.exists() else text  # noqa: PTH117


def _unknown(file: SettingsFile, command: str, key: str, known: Any) -> Problem:
    if key.replace("_", "-") in NEVER:
        what = "says what is written, sent or run. That is given on the command line only."
        return Problem(where=f"{file.place(command)} {printable(key)}", what=what, fix="Remove it from the file.")
    kind = f"an option of traindiff {command}" if command else "an option or a command of traindiff"
    return Problem.unknown_name(where=file.place(command), kind=kind, found=printable(key), known=known)


def _options(command: Any) -> Iterator[tuple[str, Any]]:
    """The options of a command that a file may set, by name without dashes."""
    for one in getattr(command, "params", ()):
        if one.param_type_name != "option" or one.hidden:
            continue
        name = option_name(one)
        if name not in NEVER and len(name) > 1:
            yield name, one


def option_name(option: Any) -> str:
    """The first long name of an option, without dashes; the short one if it has no other."""
    names: list[str] = option.opts
    return next((name for name in names if name.startswith("--")), names[0]).lstrip("-")


def _kind(option: Any) -> tuple[Any, ...]:
    return option.metavar, option.multiple, option.is_flag
