"""`traindiff report` and `traindiff view`: results in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traindiff.cli.app import app, messages, says_what_is_wrong
from traindiff.cli.workers import WorkersOption

if TYPE_CHECKING:
    from traindiff.analyse.check import Verdict
    from traindiff.analyse.compare import Comparison


NoiseOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="RECORDING",
        help="Recording of a replica of the baseline, or of the baseline run again, to measure floors from. "
        "Repeatable.",
    ),
]
MapOption = Annotated[
    str | None,
    typer.Option(
        "--map",
        metavar="FILE.toml",
        help="Which tensors and modules are which, or the name of a map (traindiff explain maps).",
    ),
]
AcceptOption = Annotated[
    Path | None, typer.Option("--accept", metavar="FILE.toml", help="Intended differences, each with a reason.")
]
RenameOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN=REPLACEMENT",
        help="Regular expression that turns the candidate's paths into the baseline's. Repeatable.",
    ),
]


IdenticalOption = Annotated[
    bool,
    typer.Option(
        "--identical",
        help="Demand the same bits: the first divergence is the first site whose bits differ, however little.",
    ),
]


HtmlOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Also write the report as an HTML file (traindiff explain report).")
]
"""Option of commands whose result can be shown in a browser."""


@app.command(short_help="Write a report of one run, or of two, as an HTML file.")
@says_what_is_wrong
def report(
    baseline: Annotated[str, typer.Argument(metavar="BASELINE", help="Recording of the run that is trusted.")],
    candidate: Annotated[
        str | None,
        typer.Argument(metavar="CANDIDATE", help="Recording of the run in question. Without it, BASELINE is checked."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("report.html"),
    png: Annotated[
        Path | None, typer.Option(metavar="DIRECTORY", help="Also write the main pictures there, as PNG.")
    ] = None,
    noise: NoiseOption = None,
    rename: RenameOption = None,
    layout: MapOption = None,
    accept: AcceptOption = None,
    steps: Annotated[str | None, typer.Option(help='Steps to show, e.g. "0-9,20,30-".')] = None,
    workers: WorkersOption = None,
) -> None:
    """Write a report for a browser, in one file that needs no network.

    For two recordings, it shows the comparison; for one, the result of `traindiff check`. Exits with 0 if the file is
    written, whatever the verdict, and with 2 if the input cannot be used.
    """
    from traindiff.analyse.check import check
    from traindiff.analyse.compare import compare
    from traindiff.errors import ConfigError, Problem

    check_writable(output)
    if png is not None:
        from traindiff.present.pictures import check_directory, write_pictures

        check_directory(png)
    result: Comparison | Verdict
    if candidate is None:
        options = (("--noise", noise), ("--rename", rename), ("--map", layout), ("--accept", accept))
        given = [name for name, value in options if value]
        if given:
            fix = "Give a baseline and a candidate, or leave it out."
            problems = [
                Problem(where=name, what="is for two recordings, and one was given.", fix=fix) for name in given
            ]
            raise ConfigError("report", problems, consequence="nothing was written")
        with messages.status("checking") as status:
            result = check(
                baseline, steps=steps, history=True, workers=workers,
                progress=lambda step: status.update(f"checking step {step}"),
            )  # fmt: skip
    else:
        with messages.status("comparing") as status:
            result = compare(
                baseline, candidate, noise=noise or (), rename=rename, map=layout, accept=accept, steps=steps,
                history=True, workers=workers,
                progress=lambda step: status.update(f"comparing step {step}"),
            )  # fmt: skip
    write_page(result, output)
    if png is not None:
        written = write_pictures(result, png)
        messages.print(f"traindiff: wrote {', '.join(map(str, written))}", markup=False, soft_wrap=True)


def check_writable(output: Path) -> None:
    """Raise `ConfigError` if a file cannot be written, before its content is computed; the file stays as it is."""
    from traindiff.errors import ConfigError, Problem

    there = output.exists()
    try:
        output.open("a", encoding="utf-8").close()
    except OSError as error:
        fix = "Give the path of a file in a directory that is there and where you may write."
        problem = Problem(where=str(output), what=f"cannot be written: {error.strerror}.", fix=fix)
        raise ConfigError("report", [problem], consequence="nothing was written") from None
    if not there:
        output.unlink()


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
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 for any that is free.")] = 8421,
    browse: Annotated[bool, typer.Option("--open", help="Open the list in the browser.")] = False,
) -> None:
    """Serve reports of all recordings under a directory on this machine, until it is interrupted.

    A report of a run that is still recording brings itself up to date. Nothing is written, and nothing outside the
    directory is read.
    """
    from traindiff.errors import ConfigError, Problem
    from traindiff.present.viewer import Viewer
    from traindiff.storage.location import file_system, lacks_container

    files, root = file_system(directory)
    if not files.isdir(root):
        if (missing := lacks_container(files, root)) is not None:
            raise missing
        what = "is not a directory." if files.exists(root) else "does not exist."
        fix = "Give the directory that holds recordings."
        raise ConfigError("view", [Problem(where=str(directory), what=what, fix=fix)])
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
