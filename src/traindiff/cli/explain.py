"""`traindiff explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from traindiff.cli.app import app, results, says_what_is_wrong


@app.command(short_help="Explain a term, a kind of finding, or a rule.")
@says_what_is_wrong
def explain(
    term: Annotated[
        list[str] | None, typer.Argument(metavar="TERM", help='Term, e.g. "noise floor" or never-updated.')
    ] = None,
) -> None:
    """Explain a term of traindiff, a kind of finding, or a rule of `traindiff check`.

    Without TERM, list all of them.
    """
    from traindiff.present.glossary import explain as explanations
    from traindiff.present.glossary import known_names

    if term:
        paragraphs = explanations(" ".join(term))
    else:
        paragraphs = [f"{title}: {', '.join(names)}." for title, names in known_names().items()]
    results.print("\n\n".join(paragraphs), markup=False)
