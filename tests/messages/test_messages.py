"""All that traindiff says to its users when something is wrong, in one file that can be read in a row."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.messages.generate import CHAPTERS, GOLDEN, every_message
from tests.messages.sites import Line, passed, sites

NOT_PROVOKED = {
    "dtype {} is not supported": "no dtype that torch has today comes so far",
    "_unreadable(error)": "needs a device whose tensors cannot be copied to the CPU",
    "ZeRO has moved the parameter to NVMe": "needs DeepSpeed and a disk for its parameters",
    "llvmlite {} is too old": "never shown: NumPy takes over; tests/core/kernels/test_registry.py",
    "its elements cannot be read: {}": "of the two kernels for the CPU one is in use; that for the GPU needs one",
    "_config_error(error, self._asked_by(name))": "what a rank in a process of its own raised, raised again",
    "{}, run {}": "what a rank in a process of its own raised, raised again",
    "TraindiffError(told)": "other ranks, of what rank 0 has raised; tests/run/processes/test_present_ranks.py",
    "rank 0 can no longer be reached: {}": "needs ranks of a launcher that die",
    "the file of the node holds {} steps of its ranks, and readers take no more: record fewer steps (every=...), or "
    "leave out per_node": "needs a million steps; tests/storage/test_node_files.py",
    **dict.fromkeys(
        (
            "it returned {} instead of the parameter after the step",
            "a formula can use the norm with p=2 only, not p={}",
            "a formula cannot use torch.{}, because its rounding is unknown; it can use + - * / ** and {}",
        ),
        "the recording says it; tests/observe/replay/test_user_formulas.py",
    ),
    **dict.fromkeys(
        (
            "its result is {}, which may be cut off at the largest number",
            "its result is scaled",
            "its scales are of blocks",
            "a bias is added to its groups",
            "it is a product of {}",
            "a factor is a nested tensor",
            "a factor is {}",
            "there is no float64 on {}",
        ),
        "check lists it as not checked; tests/observe/products",
    ),
    "RuntimeError(_COMPILED)": "the recording says it; tests/observe/hooks/test_operators.py",
    '--products | asks for matrix products, and {} has none. | Record some steps with record(observe=["products"], '
    'steps="0-1"), or leave it out.': "tests/cli/test_check_products.py",
    "check | nothing was printed": "the consequence of the one before",
    "subscribe(subscribers=...) | is {}, and no list.": "tests/compat/onnxruntime",
    "ended with exit code {} instead of {}. | traindiff doctor tells whether recording works here.": (
        "needs a machine where a command of the tour fails"
    ),
    "demo | the tour ends here": "the consequence of the one before",
    **dict.fromkeys(
        ("KeyError(at)",),
        "a programmer's error: a step that was not packed",
    ),
    **dict.fromkeys(
        ("is {}; it must be a text or a number.",),
        "tests/cli/test_settings_file.py",
    ),
    **dict.fromkeys(
        (
            "plot({}) | names no site of this result.",
            "plot | nothing was drawn",
            "ModuleNotFoundError(text, name=name)",
            "plot({})",
        ),
        "tests/present/test_notebook.py",
    ),
    **dict.fromkeys(
        ("OpenTelemetry's exporter could not send it",),
        "needs OpenTelemetry; tests/present/test_telemetry.py",
    ),
    **dict.fromkeys(
        (
            "{} | is no directory. | Give the directory that holds recordings.",
            "mcp | nothing was started",
            "traindiff mcp | needs the package mcp, 2.0 or later.",
            "investigate | runs code, which this server was not allowed to do. | "
            "Run it yourself: {}. Or start the server with traindiff mcp --run.",
            "investigate | nothing was run",
            "a recording of this server",
            "nothing was read",
            "is no recipe of a file below the directory of this server. | "
            "Write FILE.py:FUNCTION, with the path of the file below that directory.",
            "investigate | ended with exit code {}. | Read what it said, and change the recipe.",
            "investigate | there is no result",
        ),
        "an agent reads it; tests/run/agents",
    ),
    **dict.fromkeys(
        ("AssertionError('\\n'.join([headline, '', str(result), '', *lines]) + hint)",),
        "a test that fails reads it; tests/run/testing/test_assert_equivalent.py",
    ),
    **dict.fromkeys(
        (
            "FileNotFoundError(path)",
            "the process that writes for this node could not be started",
            "{} belongs to somebody else",
            "FileExistsError(errno.EEXIST, message)",
            "OSError(errno.EIO, message)",
            "another recording is being written there",
            "there is a recording already ({})",
            "the other end has gone",
            "the process that writes for this node has ended",
        ),
        "needs ranks of a node, and their process; tests/storage/test_node_files.py",
    ),
    "interrupted": "needs somebody who interrupts",
    "A task of Ray failed {} times: {}": "needs a cluster of Ray; tests/analyse/blocks/test_on_ray.py",
    "the Trainer has ended; give it more steps (max_steps)": "needs a trainer; tests/integrations/test_resuming.py",
    "LockstepError(told['error'])": "other ranks, of what rank 0 has raised; tests/run/lockstep/test_on_ranks.py",
}
"""By the words of the source: messages that no situation provokes, and why."""


@pytest.fixture(scope="module")
def provoked() -> tuple[str, set[Line]]:
    """Every message, and the lines of the source that they come from."""
    with passed() as lines:
        text = every_message()
    return text, lines


def test_every_message_is_that_of_the_golden_file(provoked: tuple[str, set[Line]]) -> None:
    """After a change: `python -m tests.messages.generate`, and read the difference."""
    assert provoked[0] == GOLDEN.read_text(encoding="utf-8")


def test_every_place_that_makes_a_message_is_in_the_golden_file(provoked: tuple[str, set[Line]]) -> None:
    text, lines = provoked
    silent = {str(site): site.text for site in sites() if not site.is_passed(lines, text)}

    assert {site: text for site, text in silent.items() if text not in NOT_PROVOKED} == {}
    assert set(NOT_PROVOKED) <= set(silent.values()), "of the messages that are excused, some are provoked, or gone"


def test_each_situation_has_a_title_of_its_own() -> None:
    titles = [(chapter.title, one.title) for chapter in CHAPTERS for one in chapter.situations]
    assert len(titles) == len(set(titles))


def problems() -> Iterator[list[str]]:
    """The three lines of each problem: where, what, and what to write."""
    for block in re.findall(r"^    \d+ problems? in .*?(?=^##|^Exit|\Z)", GOLDEN.read_text(), re.MULTILINE | re.DOTALL):
        for problem in block.strip().split("\n\n")[1:]:
            yield [line.strip() for line in problem.splitlines()]


def test_every_problem_says_where_it_is_what_it_is_and_what_to_write() -> None:
    found = [problem for problem in problems() if not problem[0].startswith("=")]

    assert len(found) > 60
    assert [problem for problem in found if len(problem) != 3] == []
    assert [what for _, what, _ in found if not re.search(r"[.?]$|raised \w+: ", what)] == []
    assert [fix for _, _, fix in found if not fix.endswith((".", ". ", "..."))] == []


def test_no_message_speaks_of_sides_or_of_what_is_inside() -> None:
    golden = re.sub(
        r"the \w+ tap failed: |No space left on device", "", GOLDEN.read_text()
    )  # recordings', the system's
    assert re.findall(r"\b(?:left|right|old|new|taps?|sink|hooks?|NoneType)\b", golden) == []
