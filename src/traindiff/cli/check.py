"""`traindiff check`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from traindiff.cli.app import app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.following import follower, hand_on
from traindiff.cli.given import chosen_format
from traindiff.cli.options import (
    SHOWN,
    AlertOption,
    ConfigOption,
    FollowOption,
    FormatOption,
    HtmlOption,
    IgnoreOption,
    JsonOption,
    JunitOption,
    PatienceOption,
    RulesOption,
    SkipOption,
    StepsOption,
    TopOption,
    WebhookOption,
    WorkersOption,
)
from traindiff.cli.output_file import check_writable
from traindiff.cli.progress import step_progress
from traindiff.cli.report import write_page

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
    context: typer.Context,
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording of the run to check.")],
    steps: StepsOption = None,
    workers: WorkersOption = None,
    ignore: IgnoreOption = None,
    rules: RulesOption = None,
    skip: SkipOption = None,
    config: ConfigOption = None,
    products: Annotated[
        bool,
        typer.Option(
            "--products",
            rich_help_panel=SHOWN,
            help="Also list how exact matrix products are (traindiff explain products).",
        ),
    ] = False,
    html: HtmlOption = None,
    top: TopOption = 12,
    junit: JunitOption = None,
    webhook: WebhookOption = None,
    alert: AlertOption = None,
    form: FormatOption = "text",
    as_json: JsonOption = False,
    follow: FollowOption = False,
    patience: PatienceOption = 600.0,
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

    form = chosen_format(context, form, as_json=as_json)
    if html is not None:
        check_writable(html)
    waiting = follower(context, follow, patience, webhook, junit, alert or ())
    with step_progress(messages, "checking", (recording,), steps=steps, endless=follow) as on_step:
        result = check_recording(
            recording, steps=steps, rules=rules, skip=skip, config=config, ignore=ignore, history=html is not None,
            follow=waiting, workers=workers, progress=on_step,
        )  # fmt: skip
    table = checked_products(result) if products else None

    def text() -> None:
        print_report(results, result, top=top)
        if table is not None:
            print_products(results, table)

    if html is not None:
        write_page(result, html)
    try:
        print_result(table if form == "csv" and table is not None else result, form, text=text)
    finally:  # also if nobody reads what is printed
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
