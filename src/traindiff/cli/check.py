"""`traindiff check`."""

from __future__ import annotations

from typing import Annotated

import typer

from traindiff.cli.app import FormatOption, JsonOption, app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.report import HtmlOption, check_writable, write_page


@app.command(short_help="Check one run by itself, without a baseline.")
@says_what_is_wrong
def check(
    recording: Annotated[str, typer.Argument(metavar="RECORDING", help="Recording of the run to check.")],
    steps: Annotated[str | None, typer.Option(help='Steps to check, e.g. "0-9,20,30-".')] = None,
    top: Annotated[int, typer.Option(min=0, help="Rows of the table of further findings.")] = 12,
    html: HtmlOption = None,
    form: FormatOption = "text",
    as_json: JsonOption = False,
) -> None:
    """Check one run by itself: copies on ranks agree, the optimizer does what it says, reported numbers fit.

    Exits with 0 if the run is healthy, 1 if it is not, 2 if the input cannot be used, and 3 if a part of the
    run was not recorded.
    """
    from traindiff.health import check as check_recording
    from traindiff.report.check import print_check

    if html is not None:
        check_writable(html)
    with messages.status("checking") as status:
        result = check_recording(
            recording,
            steps=steps,
            history=html is not None,
            progress=lambda step: status.update(f"checking step {step}"),
        )
    if html is not None:
        write_page(result, html)
    print_result(result, "json" if as_json else form, text=lambda: print_check(results, result, top=top))
    raise typer.Exit(result.exit_code)
