"""`traindiff check`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traindiff.cli.app import FormatOption, JsonOption, app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.following import (
    AlertOption,
    FollowOption,
    JunitOption,
    PatienceOption,
    WebhookOption,
    follower,
    hand_on,
)
from traindiff.cli.report import HtmlOption, check_writable, write_page
from traindiff.cli.workers import WorkersOption

if TYPE_CHECKING:
    from traindiff.analyse.check import Verdict
    from traindiff.analyse.products import ProductTable


def _list_rules(wanted: bool) -> None:  # noqa: FBT001  the shape of typer's callbacks
    if wanted:
        from traindiff.analyse.check import RULES
        from traindiff.present.text.results import print_rules

        print_rules(results, RULES)
        raise typer.Exit


@app.command(short_help="Check one run by itself, without a baseline.")
@says_what_is_wrong
def check(
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording of the run to check.")],
    steps: Annotated[str | None, typer.Option(help='Steps to check, e.g. "0-9,20,30-".')] = None,
    rules: Annotated[str | None, typer.Option(metavar="A,B", help="Rules to ask, by name. All, if left out.")] = None,
    skip: Annotated[str | None, typer.Option(metavar="A,B", help="Rules to leave out.")] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE.toml", help="Limits: a table [RULE] of LIMIT = NUMBER for each rule.")
    ] = None,
    top: Annotated[int, typer.Option(min=0, help="Rows of the table of further findings.")] = 12,
    products: Annotated[
        bool, typer.Option("--products", help="Also list how exact matrix products are (traindiff explain products).")
    ] = False,
    html: HtmlOption = None,
    workers: WorkersOption = None,
    follow: FollowOption = False,
    patience: PatienceOption = 600.0,
    webhook: WebhookOption = None,
    junit: JunitOption = None,
    alert: AlertOption = None,
    form: FormatOption = "text",
    as_json: JsonOption = False,
    _: Annotated[
        bool, typer.Option("--list", callback=_list_rules, is_eager=True, help="List all rules with their limits.")
    ] = False,
) -> None:
    """Check one run by itself: hold it against rules that a healthy run keeps (traindiff explain rules).

    Exits with 0 if the run is healthy, warnings or not, 1 if it is not, 2 if the input cannot be used, and 3 if a
    part of the run was not recorded: it was killed or aborted, no optimizer has stepped, or a rank is missing.
    """
    from traindiff.analyse.check import check as check_recording
    from traindiff.present.text.results import print_products, print_report

    if html is not None:
        check_writable(html)
    waiting = follower(follow, patience, webhook, junit, alert or ())
    with messages.status("checking") as status:
        result = check_recording(
            recording, steps=steps, rules=rules, skip=skip, config=config, history=html is not None, follow=waiting,
            workers=workers,
            progress=lambda step: status.update(f"checking step {step}"),
        )  # fmt: skip
    table = checked_products(result) if products else None

    def text() -> None:
        print_report(results, result, top=top)
        if table is not None:
            print_products(results, table)

    if html is not None:
        write_page(result, html)
    form = "json" if as_json else form
    print_result(table if form == "csv" and table is not None else result, form, text=text)
    hand_on(result, webhook, junit, alert or ())
    raise typer.Exit(result.exit_code)


def checked_products(verdict: Verdict) -> ProductTable:
    """The table of products of a verdict.

    Raises:
        ConfigError: The run has recorded none.
    """
    from traindiff.errors import ConfigError, Problem

    if verdict.products is None:
        problem = Problem(
            where="--products",
            what=f"asks for matrix products, and {verdict.recording} has none.",
            fix='Record some steps with record(observe=["products"], steps="0-1"), or leave it out.',
        )
        raise ConfigError("check", [problem], consequence="nothing was printed")
    return verdict.products
