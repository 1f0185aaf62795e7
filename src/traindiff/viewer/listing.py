"""The list of recordings as a page."""

from __future__ import annotations

import os
from urllib.parse import quote

from traindiff.report.page.writing import environment, policy, styles
from traindiff.viewer.catalogue import MOST, Catalogue


def write_listing(catalogue: Catalogue) -> str:
    """The page that lists the recordings under a directory.

    Args:
        catalogue: The directory.
    """
    found = catalogue.recordings()
    return (
        environment("traindiff.viewer")
        .get_template("listing.html")
        .render(
            root=str(catalogue.root),
            recordings=[(one, quote(os.fsencode(one.name))) for one in found],
            growing=any(one.ending == "unclosed" for one in found),
            most=MOST if len(found) >= MOST else 0,
            policy=policy("", sends_forms=True),
            styles=styles(),
        )
    )


def message_page(text: str, *, again: int = 0) -> str:
    """A page that says one thing.

    Args:
        text: What it says.
        again: After so many seconds a browser asks for it again; 0 for never.
    """
    template = environment("traindiff.viewer").get_template("message.html")
    return template.render(text=text, again=again, policy=policy(""), styles=styles())
