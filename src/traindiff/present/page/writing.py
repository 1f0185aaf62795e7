"""Write a page as one HTML file."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import IO, TYPE_CHECKING

from traindiff._version import __version__
from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison
from traindiff.errors import ConfigError, Problem
from traindiff.present.page.content import Page
from traindiff.present.page.pages import page_of_check, page_of_comparison

if TYPE_CHECKING:
    from jinja2 import Environment

STYLES = ("vendor/uPlot.min.css", "page.css")
LIBRARY, LICENSE = "vendor/uPlot.iife.min.js", "vendor/uPlot-LICENSE.txt"
SCRIPTS = (
    "script/arrays.js", "script/colors.js", "script/words.js",
    "script/state.js", "script/curves.js", "script/heat_map.js", "script/pointing.js", "script/details.js",
    "script/tables.js", "script/main.js",
)  # fmt: skip
"""What a page holds, in the order in which it runs."""


def page_of(result: Comparison | Verdict) -> Page:
    """What the page of a result says.

    Args:
        result: Of `compare(..., history=True)` or `check(..., history=True)`.

    Raises:
        ConfigError: The result has no history.
    """
    if isinstance(result, Comparison) and result.history is not None:
        return page_of_comparison(result, result.history)
    if isinstance(result, Verdict) and result.history is not None:
        return page_of_check(result, result.history)
    name = "compare" if isinstance(result, Comparison) else "check"
    problem = Problem(
        where=f"the result of {name}(...)",
        what="does not hold the numbers of every step, which a page shows.",
        fix=f"Call {name}(..., history=True).",
    )
    raise ConfigError("report", [problem], consequence="nothing was written")


def write(page: Page, file: IO[str], *, home: str = "", refresh: str = "") -> None:
    """Write a page.

    Args:
        page: What it says.
        file: Where to write it.
        home: Address of the list of recordings on the same server; empty for a file.
        refresh: Path of the same server at which the page asks whether there is something new; empty for a file, which
            asks for nothing.
    """
    script = _script()
    template = environment("traindiff.present.page").get_template("page.html")
    file.writelines(
        template.generate(
            page=page,
            policy=policy(script, asks=bool(refresh)),
            styles=styles(),
            script=script,
            home=home,
            refresh=refresh,
            version=__version__,
        )
    )


def policy(script: str, *, asks: bool = False, sends_forms: bool = False) -> str:
    """What a browser lets a page do: run this script and no other, and load nothing.

    Args:
        script: The page's script; empty for none.
        asks: Whether it may ask the server that it comes from.
        sends_forms: Whether it may send a form to it.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    parts = {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "script-src": f"'sha256-{digest}'" if script else "'none'",
        "img-src": "data:",
        "connect-src": "'self'" if asks else "'none'",
        "base-uri": "'none'",
        "form-action": "'self'" if sends_forms else "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def styles() -> str:
    """The style sheet of every page."""
    return "\n".join(map(_read, STYLES))


@cache
def _script() -> str:
    return "\n".join(
        ("/*", _read(LICENSE), "*/", _read(LIBRARY), '(() => {\n"use strict";', *map(_read, SCRIPTS), "})();")
    )


@cache
def _read(name: str) -> str:
    return files("traindiff.present.page").joinpath(name).read_text(encoding="utf-8")


@cache
def environment(package: str) -> Environment:
    """Templates of a package; what they are filled with is text, and escaped.

    Args:
        package: Its dotted name.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from traindiff.analyse.findings import phase_text
    from traindiff.present.page.dataflow import message

    environment = Environment(
        loader=PackageLoader(package, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.globals.update(phase_text=phase_text, in_words=message)
    return environment
