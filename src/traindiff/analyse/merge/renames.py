"""Turn the candidate's paths into the baseline's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from traindiff.errors import ConfigError, Problem

Rename = Callable[[str], str]


class Renaming:
    """Maps the candidate's paths to the baseline's, and knows which rules have changed no path."""

    def __init__(self, rules: Sequence[tuple[re.Pattern[str], str]] = ()) -> None:
        self._rules = tuple(rules)
        self._used: set[int] = set()

    def __call__(self, path: str) -> str:
        """The path under the baseline's name."""
        for number, (rule, replacement) in enumerate(self._rules):
            path, changes = rule.subn(replacement, path)
            if changes:
                self._used.add(number)
        return path

    @property
    def has_rules(self) -> bool:
        """True if it may change a path."""
        return bool(self._rules)

    @property
    def unused(self) -> tuple[str, ...]:
        """Rules that matched nothing so far, as the user wrote them."""
        rules = enumerate(self._rules)
        return tuple(f"{rule.pattern}={text}" for number, (rule, text) in rules if number not in self._used)


def renames(rename: Rename) -> bool:
    """False if no path is another one under the baseline's names."""
    return not (rename is str or (isinstance(rename, Renaming) and not rename.has_rules))


def parse_renames(renames: Mapping[str, str] | Sequence[str] | None) -> Renaming:
    r"""A function that maps the candidate's paths to the baseline's.

    Args:
        renames: Regular expressions and replacements as in `re.sub`, as a mapping or as
            `PATTERN=REPLACEMENT` texts; all are applied, in order, to each path.

    Raises:
        ConfigError: A text without `=`, an empty pattern, or an invalid expression or replacement.
    """
    if not renames:
        return Renaming()
    pairs = list(renames.items()) if isinstance(renames, Mapping) else [text.partition("=")[::2] for text in renames]
    problems: list[Problem] = []
    rules: list[tuple[re.Pattern[str], str]] = []
    for pattern, replacement in pairs:
        where, what = f"rename {pattern}={replacement}", ""
        if not isinstance(renames, Mapping) and not any(text.startswith(pattern + "=") for text in renames):
            where, what = f"rename {pattern}", 'has no "=".'
        elif not pattern:
            what = 'has no pattern before the "=".'
        else:
            try:
                rules.append((re.compile(pattern), replacement))
                rules[-1][0].sub(replacement, "")
            except (re.error, IndexError) as error:
                what = f"is not a regular expression: {error}."
        if what:
            problems.append(Problem(where=where, what=what, fix=_RENAME_FIX))
    if problems:
        raise ConfigError("compare(...)", problems, consequence="nothing was compared")

    return Renaming(rules)


_RENAME_FIX = r"Write PATTERN=REPLACEMENT, e.g. '^model\.layers\.=transformer.h.'."
