"""`traindiff report` and `traindiff view`: results in a browser."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from traindiff.cli.app import app, messages, says_what_is_wrong
from traindiff.cli.options import (
    SHOWN,
    AcceptOption,
    AtolOption,
    BaselineArgument,
    ConfigOption,
    IdenticalOption,
    IgnoreOption,
    MapOption,
    NoiseOption,
    OffsetOption,
    RenameOption,
    RtolOption,
    RulesOption,
    SkipOption,
    StepsOption,
    WorkersOption,
)
from traindiff.cli.output_file import check_writable
from traindiff.cli.progress import step_progress
from traindiff.errors import ConfigError, Problem

if TYPE_CHECKING:
    from traindiff.analyse.check import Verdict
    from traindiff.analyse.compare import Comparison


@app.command(short_help="Write a report of one run, or of two, as an HTML file.")
@says_what_is_wrong
def report(
    baseline: BaselineArgument,
    candidate: Annotated[
        str | None,
        typer.Argument(metavar="CANDIDATE", help="Recording of the run in question. Without it, BASELINE is checked."),
    ] = None,
    steps: StepsOption = None,
    workers: WorkersOption = None,
    noise: NoiseOption = None,
    rename: RenameOption = None,
    layout: MapOption = None,
    accept: AcceptOption = None,
    ignore: IgnoreOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    identical: IdenticalOption = False,
    offset: OffsetOption = None,
    rules: RulesOption = None,
    skip: SkipOption = None,
    config: ConfigOption = None,
    html: Annotated[
        Path, typer.Option("--html", "--output", "-o", metavar="FILE", rich_help_panel=SHOWN, help="File to write.")
    ] = Path("report.html"),
    png: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", rich_help_panel=SHOWN, help="Also write the main pictures there, as PNG."),
    ] = None,
) -> None:
    """Write a report for a browser, in one file that needs no network.

    For two recordings, it shows the comparison; for one, the result of `traindiff check`. Exits with 0 if the file is
    written, whatever the verdict, and with 2 if the input cannot be used.
    """
    from traindiff.analyse.check import check
    from traindiff.analyse.compare import compare

    check_writable(html)
    if png is not None:
        from traindiff.present.pictures import check_directory, write_pictures

        check_directory(png)
    result: Comparison | Verdict
    of_two: dict[str, Any] = {
        "noise": noise or (), "rename": rename, "map": layout, "accept": accept,
        "rtol": rtol, "atol": atol, "identical": identical, "offset": offset,
    }  # fmt: skip
    of_one: dict[str, Any] = {"rules": rules, "skip": skip, "config": config}
    if candidate is None:
        _refuse(
            of_two, "is for two recordings, and one was given.", "Give a baseline and a candidate, or leave it out."
        )
        with step_progress(messages, "checking", (baseline,), steps=steps) as on_step:
            result = check(
                baseline, steps=steps, **of_one, ignore=ignore, history=True, workers=workers, progress=on_step,
            )  # fmt: skip
    else:
        _refuse(of_one, "is for one recording, and two were given.", "Give one recording, or leave it out.")
        with step_progress(messages, "comparing", (baseline, candidate), steps=steps) as on_step:
            result = compare(
                baseline, candidate, steps=steps, **of_two, ignore=ignore, history=True, workers=workers,
                progress=on_step,
            )  # fmt: skip
    write_page(result, html)
    if png is not None:
        written = write_pictures(result, png)
        messages.print(f"traindiff: wrote {', '.join(map(str, written))}", markup=False, soft_wrap=True)


def _refuse(settings: Mapping[str, Any], what: str, fix: str) -> None:
    """Raise `ConfigError` if one of these options was given: they belong to the other number of recordings."""
    problems = [
        Problem(where=f"--{name}", what=what, fix=fix)
        for name, value in settings.items()
        if value not in (None, False, ())
    ]
    if problems:
        raise ConfigError("report", problems, consequence="nothing was written")


def write_page(result: Comparison | Verdict, output: Path) -> None:
    """Write the page of a result that has a history, and print its path."""
    from traindiff.present.page import page_of, write

    page = page_of(result)
    with output.open("w", encoding="utf-8", errors="replace") as file:  # a path may be no UTF-8
        write(page, file)
    messages.print(f"traindiff: wrote {output}: {page.story.word}", markup=False, soft_wrap=True)


@app.command(short_help="Show reports of all recordings under a directory in a browser.")
@says_what_is_wrong
def view(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="Recordings are looked for under it. May be a URL.")
    ],
    port: Annotated[
        int, typer.Option(min=0, max=65535, metavar="PORT", help="Port on 127.0.0.1; 0 for any that is free.")
    ] = 8421,
    browse: Annotated[bool, typer.Option("--open", help="Open the list in the browser.")] = False,
) -> None:
    """Serve reports of all recordings under a directory on this machine, until it is interrupted.

    A report of a run that is still recording brings itself up to date. Nothing is written, and nothing outside the
    directory is read.
    """
    from traindiff.present.viewer import Viewer

    check_directory(directory, asked_by="view")
    try:
        viewer = Viewer(directory, port=port)
    except OSError as error:
        fix = "Give another port, or --port 0 for any that is free."
        problem = Problem(where=f"--port {port}", what=f"cannot be used: {error.strerror}.", fix=fix)
        raise ConfigError("view", [problem]) from None
    messages.print(f"traindiff: {viewer.address} shows the recordings under {directory}", markup=False, soft_wrap=True)
    if browse:
        import webbrowser

        webbrowser.open(viewer.address)
    try:
        viewer.serve()
    except KeyboardInterrupt:
        messages.print("traindiff: stopped")
    finally:
        viewer.close()


def check_directory(directory: str, *, asked_by: str) -> None:
    """Raise `ConfigError` if there is no such directory, local or on a store."""
    from traindiff.storage.location import file_system, lacks_container

    files, root = file_system(directory)
    if not files.isdir(root):
        if (missing := lacks_container(files, root)) is not None:
            raise missing
        what = "is not a directory." if files.exists(root) else "does not exist."
        fix = "Give the directory that holds recordings."
        raise ConfigError(asked_by, [Problem(where=directory, what=what, fix=fix)])
