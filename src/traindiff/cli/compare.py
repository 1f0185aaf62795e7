"""`traindiff compare`."""

from __future__ import annotations

from typing import Annotated

import typer

from traindiff.cli.app import FormatOption, JsonOption, app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.report import HtmlOption, check_writable, write_page


@app.command()
@says_what_is_wrong
def compare(
    baseline: Annotated[str, typer.Argument(metavar="BASELINE", help="Recording of the run that is trusted.")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="Recording of the run in question.")],
    noise: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RECORDING",
            help="Recording of a replica of the baseline, or of the baseline run again, to measure floors from. "
            "Repeatable.",
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN=REPLACEMENT",
            help="Regular expression that turns the candidate's paths into the baseline's. Repeatable.",
        ),
    ] = None,
    steps: Annotated[str | None, typer.Option(help='Steps to compare, e.g. "0-9,20,30-".')] = None,
    rtol: Annotated[
        float | None,
        typer.Option(help="Relative tolerance in place of floors: ||c-b|| <= rtol ||b|| + atol sqrt(n)."),
    ] = None,
    atol: Annotated[float | None, typer.Option(help="Absolute tolerance per element, in the same formula.")] = None,
    top: Annotated[int, typer.Option(min=0, help="Rows of each table.")] = 12,
    html: HtmlOption = None,
    form: FormatOption = "text",
    as_json: JsonOption = False,
) -> None:
    """Compare two recordings and name the first divergence.

    Exits with 0 if the runs are identical or equivalent, 1 if they diverged, 2 if the input cannot be
    used, and 3 if they are misaligned or could only be compared in part.
    """
    from traindiff.comparison import compare as compare_recordings
    from traindiff.report.terminal import print_comparison

    if html is not None:
        check_writable(html)
    with messages.status("comparing") as status:
        result = compare_recordings(
            baseline,
            candidate,
            noise=noise or (),
            rename=rename,
            steps=steps,
            rtol=rtol,
            atol=atol,
            history=html is not None,
            progress=lambda step: status.update(f"comparing step {step}"),
        )
    if html is not None:
        write_page(result, html)
    print_result(result, "json" if as_json else form, text=lambda: print_comparison(results, result, top=top))
    raise typer.Exit(result.exit_code)
