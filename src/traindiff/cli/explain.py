"""`traindiff explain`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from traindiff.cli.app import app, results, says_what_is_wrong
from traindiff.cli.given import chosen_format
from traindiff.cli.options import SHOWN, JsonOption


def _format(name: str) -> str:
    if name not in ("text", "json"):
        raise typer.BadParameter(f"{name!r} is not a format. Known: text, json.")
    return name


@app.command(short_help="Explain a term, a kind of finding, a rule, or print a page of the documentation.")
@says_what_is_wrong
def explain(
    context: typer.Context,
    term: Annotated[
        list[str] | None,
        typer.Argument(metavar="TERM", help='Term, e.g. "noise floor", never-updated, or a page, e.g. agents.'),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            parser=_format,
            metavar="text|json",
            rich_help_panel=SHOWN,
            autocompletion=lambda: ["text", "json"],
            help="text for people, json for programs.",
        ),
    ] = "text",
    as_json: JsonOption = False,
) -> None:
    """Explain a term of traindiff, a kind of finding, or a rule of `traindiff check`; or print a page.

    Several words are one term, or several. Without TERM, list all terms, kinds, rules and pages.
    """
    from rich.markdown import Markdown

    from traindiff.present.glossary import PAGE, explain_all, explained, known_names

    found = explain_all(term) if term else []
    if chosen_format(context, form, as_json=as_json) == "json":
        json.dump(explained(" ".join(term) if term else None, found), sys.stdout, indent=2)
        sys.stdout.write("\n")
    elif not term:
        listed = [f"{title}: {', '.join(names)}." for title, names in known_names().items()]
        results.print("\n\n".join([*listed, "Each of them: traindiff explain NAME"]), markup=False)
    elif found[0].what == PAGE and results.is_terminal:
        results.print(Markdown(found[0].text))
    else:
        results.print("\n\n".join(map(str, found)), markup=False, soft_wrap=found[0].what == PAGE)
