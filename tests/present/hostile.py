"""A run whose names are markup, for every report that shows them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.made_up import Edit, Seen, Step, at, record

NAME = "<script>alert(1)</script>"
ATTRIBUTE = "\" onclick='alert(2)' x=\"{{7*7}}"
CLOSING = "</script><img src=x onerror=alert(3)>"
TABLE = "a|b `c` [d](http://e.example) @f **g** \x1b[31m $h_i$"

SITES = tuple(("forward", "", path, "output[0]") for path in (NAME, ATTRIBUTE, CLOSING, TABLE))


def hostile(path: Path, edit: Edit = lambda step, sites: None) -> Path:
    """Record a run of such names."""

    def add(step: int, sites: Step) -> None:
        for number, site in enumerate(SITES):
            sites[site] = Seen(values=np.random.default_rng(number).standard_normal((5, 6)).astype(np.float32))
        edit(step, sites)

    return record(path, add)


def hostile_pair(directory: Path) -> tuple[Path, Path]:
    """Two such runs that part at each of these names."""

    def wrong(step: int, sites: Step) -> None:
        for site in SITES:
            at(site, lambda values: values * 2, step=1)(step, sites)

    return hostile(directory / "base<b>line"), hostile(directory / "candi'date", wrong)
