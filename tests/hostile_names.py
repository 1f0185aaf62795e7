"""Names as somebody may have put them into a recording, to have a terminal or a table show something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.made_up import Edit, Seen, Step, both, random, record

REVERSED = "\u202egpjexe\x1b[31mred"
DIVIDED = "new\nline|pipe`tick`\\|"
ZERO = "x\x00y"
NAMES = {REVERSED: r"\u202egpjexe\x1b[31mred", DIVIDED: r"new\nline|pipe`tick`\|", ZERO: r"x\x00y"}
"""Each, and how it is shown."""

OPTIMIZER = "steps\x1b[2J"
STAGE = "late\r\n"
NOTE = "made\x9b up"
TIED = "other\x07"


def is_plain(data: bytes) -> bool:
    """Whether a terminal would follow nothing in what was printed."""
    return all(one.isprintable() for one in data.decode().split("\n"))


def hostile(path: Path, edit: Edit = lambda step, sites: None, *, names: Any = tuple(NAMES)) -> Path:
    """Record a run with modules of these names, and with such texts wherever else there is one."""

    def add(step: int, sites: Step) -> None:
        for number, name in enumerate(names):
            about = {"optimizer": OPTIMIZER}
            values = random(5, 6, seed=100 * step + number)
            sites["forward", "", name, f"output['{name}']"] = Seen(values=values, about=about)
            sites["forward", STAGE, name, "output[0]"] = Seen(values=values, about=about)
            sites["grad", "", f"{name}.weight", "grad"] = Seen(values=values, about=about)
            reason = {**about, "unobserved": f"no\x1b[1m {name}", "dtype": ""}
            sites["backward", "", name, "output[0]"] = Seen(values=random(1, seed=0), about=reason)
        for seen in sites.values():
            seen.about = {"optimizer": OPTIMIZER, **seen.about}

    parameters = {f"{name}.weight": {"shape": [5, 6], "dtype": "float32"} for name in names}
    content = {
        "model": "Mo\x1bdel",
        "modules": {"": "Mo\x1bdel", **dict.fromkeys(names, "Lin\near")},
        "parameters": parameters,
        "tied": {TIED: f"{names[0]}.weight"},
        "optimizers": [{"name": OPTIMIZER, "type": "S\x00GD", "groups": [list(parameters)]}],
    }
    run = {"environment": {"machine": NOTE}, "created": "now\x1b[0m", "versions": {"torch": "2\x1b"}}
    return record(path, both(add, edit), content=content, run=run)
