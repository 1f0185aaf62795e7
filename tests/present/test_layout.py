"""Lines, tables and numbers: readable in 80 columns, exact where it matters, plain where no terminal reads them."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console
from rich.text import Text

from tests.cli.conftest import GOLDEN
from traindiff.present.text.layout import exact_digits, print_line, print_table, shortened, told_apart

SITE = "transformer.h.12.attention.self.query.weight grad"


def printed(width: int, *, terminal: bool = False) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, highlight=False, force_terminal=terminal, color_system=None), text


@pytest.mark.parametrize("room", [14, 24, 40, 80])
def test_a_site_keeps_both_ends(room: int) -> None:
    short = shortened(SITE, room)

    assert len(short) == min(room, len(SITE))
    head, _, tail = short.partition("…")
    assert SITE.startswith(head)
    assert SITE.endswith(tail)
    assert len(SITE) <= room or 1.5 < len(tail) / len(head) < 3


def table(width: int, **settings: object) -> list[str]:
    console, text = printed(width)
    rows = [
        ("12", "forward", SITE, "float32 128x768", "1.25", "0", "0"),
        ("7", "grad", "fc.bias grad", "x", "2", "0", "0"),
    ]
    print_table(
        console, rows, left=("step", "phase", "site", "tensor"), right=("norm", "nan", "inf"),
        may_lack=("nan", "inf", "tensor"), **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    return [line.rstrip() for line in text.getvalue().splitlines()]


def test_a_wide_table_is_whole_and_a_narrow_one_first_lacks_what_says_nothing() -> None:
    wide, narrow, narrowest = table(120), table(66), table(46)

    assert "float32 128x768" in wide[1]
    assert SITE in wide[1]
    assert "nan" in wide[0]
    assert "nan" not in narrow[0]
    assert "tensor" in narrow[0]
    assert len(narrow) == 3
    assert narrowest[-1] == "(left out for lack of width: tensor)"
    for lines, width in ((wide, 120), (narrow, 66), (narrowest, 46)):
        assert max(map(len, lines)) <= width
        assert "fc.bias grad" in lines[2]


def test_a_sentence_goes_on_in_further_lines_and_the_site_stays_readable() -> None:
    console, text = printed(80)
    print_table(console, [("3", SITE, "The gradient " + "is wrong " * 12)], left=("step", "site", "what"))
    lines = text.getvalue().splitlines()

    assert max(map(len, lines)) <= 80
    assert len(lines) > 3
    assert re.search(r"transf\S*….*weight grad", lines[1])


def test_a_line_is_broken_between_words_on_a_terminal_only() -> None:
    sentence = Text("  The optimizer's gradient lacks what micro-step 2 contributed; it is the sum.")
    for terminal in (False, True):
        console, text = printed(40, terminal=terminal)
        print_line(console, sentence)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        assert " ".join(" ".join(lines).split()) == sentence.plain.strip()
        assert len(lines) == (2 if terminal else 1) or (terminal and len(lines) == 3)
        assert all(line.startswith("  ") and not line.startswith("   ") for line in lines)


@pytest.mark.parametrize(
    ("value", "text"),
    [(1024.0, "1024"), (50257, "50257"), (123456789.0, "123456789"), (0.000123456, "0.000123"), (float("nan"), "nan"),
     (3.83374, "3.83"), (1e12, "1e+12"), (-3.0, "-3"), (0.0, "0")],
)  # fmt: skip
def test_whole_numbers_are_exact(value: float, text: str) -> None:
    assert exact_digits(value, 3) == text


@pytest.mark.parametrize(
    ("pair", "texts"),
    [
        ((4.54549, 4.61), ("4.54549", "4.61")),
        ((4.5454901, 4.5454904), ("4.5454901", "4.5454904")),
        ((1.0, 1.0), ("1", "1")),
        ((1.0, 1.0 + 2**-52), ("1", "1.0000000000000002")),
        ((float("nan"), 1.0), ("nan", "1")),
    ],
)
def test_numbers_that_differ_are_shown_to_differ(pair: tuple[float, float], texts: tuple[str, str]) -> None:
    assert told_apart(*pair) == texts


COMMANDS = (
    ("compare", "baseline", "candidate"), ("check", "baseline"), ("show", "baseline"), ("ls",), ("compare", "--help"),
    ("compare", "baseline", "nothing"), ("check", "--list"), ("explain", "floor"),
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_what_is_redirected_has_no_control_codes(command: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "traindiff", *command], capture_output=True, cwd=GOLDEN, check=False,
        env={name: value for name, value in os.environ.items() if name != "FORCE_COLOR"},
    )  # fmt: skip

    assert b"\x1b" not in done.stdout + done.stderr
    assert done.stdout + done.stderr


def on_terminal(*command: str, **environment: str) -> str:
    """What a command writes to a terminal of 80 columns, on both streams."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "traindiff", *command], stdin=theirs, stdout=theirs, stderr=theirs, cwd=GOLDEN,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **environment},
    )  # fmt: skip
    os.close(theirs)
    parts = []
    while True:
        try:
            part = os.read(ours, 1 << 16)
        except OSError:
            break
        if not part:
            break
        parts.append(part)
    process.wait()
    os.close(ours)
    return b"".join(parts).decode()


COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|9[0-7]|38)(?:;\d+)*m")


def test_a_terminal_of_80_columns_has_colors_and_no_color_takes_them_away() -> None:
    colored = on_terminal("compare", "baseline", "candidate")
    plain = on_terminal("compare", "baseline", "candidate", NO_COLOR="1")

    assert COLOR.search(colored)
    assert not COLOR.search(plain)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", plain).replace("\r\n", "\n")
    result = shown[shown.rindex("diverged (") :]
    assert max(map(len, result.splitlines())) <= 80
    assert "step" in colored[: colored.rindex("diverged")]  # the bar, which is removed again
