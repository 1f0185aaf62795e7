"""Write a page as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import IO, TYPE_CHECKING, Any

from traindiff._version import __version__
from traindiff.present.page.content import Page

if TYPE_CHECKING:
    from jinja2 import Environment

STYLES = ("vendor/uPlot.min.css", "page.css")
LIBRARY, LICENSE = "vendor/uPlot.iife.min.js", "vendor/uPlot-LICENSE.txt"
SCRIPTS = (
    "script/arrays.js", "script/colors.js", "script/words.js",
    "script/state.js", "script/terms.js", "script/address.js", "script/curves.js", "script/heat_map.js",
    "script/pointing.js", "script/details.js", "script/tables.js", "script/main.js",
)  # fmt: skip
"""The scripts of a page, in the order in which they run."""


def write(page: Page, file: IO[str], *, home: str = "", refresh: str = "", known: str = "") -> None:
    """Write a page.

    Args:
        page: Its content.
        file: Where to write it.
        home: Address of the list of recordings on the same server; empty for a file.
        refresh: Path on the same server at which the page asks for changes; empty for a file, which asks for nothing.
        known: What that path answered before the recordings were read: any other answer makes the page renew itself.
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
            known=known,
            version=__version__,
        )
    )


def policy(script: str, *, asks: bool = False, sends_forms: bool = False) -> str:
    """The content security policy of a page: it runs this script and no other, and loads nothing.

    Args:
        script: The page's script; empty for none.
        asks: True if the page may send requests to its own server.
        sends_forms: True if the page may send a form to its own server.
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


@cache
def look() -> Mapping[str, Any]:
    """Colors, scales and words of the pictures, from `look.json`: for the script of a page, and for its PNG files.

    `least_span` is the least that an axis of values spans, as a share of the values: what is smaller is for the plot
    of differences.
    """
    found: Mapping[str, Any] = json.loads(_read("look.json"))
    return found


@cache
def styles() -> str:
    """The style sheet of every page."""
    light, dark = (
        f"color-scheme: {scheme}; " + " ".join(f"--{name}: {value};" for name, value in look()[scheme].items())
        for scheme in ("light", "dark")
    )
    chosen = (
        f":root {{ {light} }}",
        f':root[data-theme="dark"] {{ {dark} }}',
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}',
    )
    return "\n".join((_read(STYLES[0]), *chosen, *map(_read, STYLES[1:])))


@cache
def _script() -> str:
    constants = f"const LOOK = {json.dumps(look())};"
    parts = (
        "/*",
        _read(LICENSE),
        "*/",
        _read(LIBRARY),
        '(() => {\n"use strict";',
        constants,
        *map(_read, SCRIPTS),
        "})();",
    )
    return "\n".join(parts)


@cache
def _read(name: str) -> str:
    return files("traindiff.present.page").joinpath(name).read_text(encoding="utf-8")


@cache
def environment(package: str) -> Environment:
    """The templates of a package, by its dotted name. All values in them are text, and escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    from traindiff.analyse.findings import phase_text
    from traindiff.analyse.products import PRODUCT_COLUMNS
    from traindiff.present.page.dataflow import message

    environment = Environment(
        loader=PackageLoader(package, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.globals.update(phase_text=phase_text, in_words=message, product_columns=PRODUCT_COLUMNS)
    return environment
