"""Documented snippets of the replaced systems, run with nothing changed but the import."""

from __future__ import annotations

import textwrap
from typing import Any


def run(snippet: str, *, was: str, now: str, **names: Any) -> dict[str, Any]:
    """Run a snippet after its import was changed; returns the names that it has defined.

    Args:
        snippet: As the original documents its interface.
        was: The module that the snippet imports from; it must occur.
        now: The module of traindiff in its place.
        names: What the snippet takes as given.
    """
    assert f"from {was} import" in snippet
    defined = dict(names)
    exec(textwrap.dedent(snippet).replace(f"from {was} import", f"from {now} import"), defined)
    return defined
