"""The tree of errors, and the texts that users read."""

from __future__ import annotations

import inspect
import pickle
import re

import traindiff
from traindiff import errors
from traindiff.errors import ConfigError, Problem


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn: dict[str, str] = {}
    levels: list[str] = []
    for indent, name in re.findall(r"^( *)[*+-] (\w+)", errors.__doc__ or "", re.MULTILINE):
        level = len(indent) // 2
        levels[level:] = [name]
        drawn[name] = levels[level - 1] if level else ""

    defined = {
        name: kind.__bases__[0].__name__
        if issubclass(kind, errors.TraindiffError) and kind.__bases__ != (Exception,)
        else ""
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    assert drawn == defined


def test_all_errors_are_public() -> None:
    defined = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    }
    assert defined <= set(traindiff.__all__)


def test_a_configuration_error_lists_every_problem() -> None:
    problems = [
        Problem.unknown_name(where="[record]", kind="a setting", found="evry", known=("every", "steps", "select")),
        Problem(where="[record] every = 0", what="must be at least 1.", fix="Write every = 1."),
    ]

    error = ConfigError("run.toml", problems, consequence="nothing was attached to the model")

    assert str(error) == (
        "2 problems in run.toml; nothing was attached to the model.\n"
        "\n"
        "  [record]\n"
        '    "evry" is not a setting.\n'
        '    Did you mean "every"? Known: every, select, steps.\n'
        "\n"
        "  [record] every = 0\n"
        "    must be at least 1.\n"
        "    Write every = 1."
    )
    assert error.problems == tuple(problems)
    assert isinstance(error, ValueError)


def test_one_problem_is_a_problem_and_nothing_was_done() -> None:
    error = ConfigError("run.toml", [Problem(where="here", what="is wrong.", fix="Mend it.")])

    assert str(error) == "1 problem in run.toml; nothing was done.\n\n  here\n    is wrong.\n    Mend it."


def test_a_name_that_is_near_no_known_one_gets_no_suggestion() -> None:
    problem = Problem.unknown_name(where="here", kind="a phase", found="xyz", known=("grad", "loss"))

    assert problem.fix == "Known: grad, loss."


def test_a_configuration_error_comes_through_pickle_as_it_was() -> None:
    error = ConfigError("run.toml", [Problem(where="a", what="b", fix="c")], consequence="nothing was run")

    found = pickle.loads(pickle.dumps(error))

    assert (str(found), found.source, found.problems) == (str(error), error.source, error.problems)
    assert found.consequence == "nothing was run"


def test_lines_that_help_to_find_a_problem_stay_lines_and_are_made_printable() -> None:
    problem = Problem(where="run whole", what="failed.", fix="Mend it.", more=("Where rank 0 was:", "  a\x1b[0m"))

    assert str(ConfigError("resume(...)", [problem])).splitlines()[-3:] == [
        "    Mend it.", "    Where rank 0 was:", "      a\\x1b[0m",
    ]  # fmt: skip
