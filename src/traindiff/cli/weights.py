"""`traindiff weights`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.text import Text

from traindiff.cli.app import app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.options import JUDGED, SHOWN, AcceptOption, JsonOption, MapOption, TopOption
from traindiff.cli.output_file import FIX, check_writable
from traindiff.errors import ConfigError, Problem

_NOT_READ = "nothing was read"


@app.command(short_help="Compare saved weights: is it the same model?")
@says_what_is_wrong
def weights(
    baseline: Annotated[
        str, typer.Argument(metavar="BASELINE", help="File or directory of saved weights, or a recording.")
    ],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="What is compared with it, likewise.")],
    base: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=JUDGED,
            help="A third set, e.g. before fine-tuning: is the candidate still the base?",
        ),
    ] = None,
    layout: MapOption = None,
    accept: AcceptOption = None,
    propose: Annotated[
        Path | None,
        typer.Option(metavar="FILE.toml", rich_help_panel=SHOWN, help="Write the map that the contents suggest."),
    ] = None,
    top: TopOption = 12,
    as_json: JsonOption = False,
) -> None:
    """Compare saved weights: is what was saved, converted or loaded the same model?

    Reads safetensors, torch.save, Hugging Face directories, torch.distributed.checkpoint, DeepSpeed, Megatron, and
    recordings. Exits with 0 if the numbers are the same (identical or equivalent), 1 if they diverged, 2 if the input
    cannot be used, and 3 if tensors are in one of the two only.
    """
    if propose is not None:
        _check_proposal(propose, [one for one in (baseline, candidate, base) if one is not None])
    from traindiff.state.comparing import weights as compare_weights
    from traindiff.state.comparison import text_lines
    from traindiff.state.maps import write_map

    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=messages, transient=True, disable=not messages.is_terminal) as bar:
        task = bar.add_task("", total=None)
        result = compare_weights(
            baseline, candidate, base=base, map=layout, accept=accept,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )  # fmt: skip

    def text() -> None:
        title, *lines = text_lines(result, top=top)
        style = "bold green" if result.exit_code == 0 else "bold red" if result.exit_code == 1 else "bold yellow"
        results.print(Text(title, style=style), soft_wrap=True)
        for line in lines:
            results.print(Text(line, style="" if line.startswith(" ") else "bold" * (len(line) < 40)), soft_wrap=True)

    print_result(result, "json" if as_json else "text", text=text)
    if propose is not None:
        count = write_map(result, propose)
        messages.print(f"traindiff: wrote {count} entries to {propose}", markup=False, soft_wrap=True)
    raise typer.Exit(result.exit_code)


def _check_proposal(file: Path, sources: Sequence[str]) -> None:
    """Refuse a file for the map that cannot be written, or that is one of the sources, before these are read.

    Raises:
        ConfigError: It is so.
    """
    if any(Path(one).exists() and file.exists() and file.samefile(one) for one in sources):
        problem = Problem(where=f"--propose {file}", what="is what is compared.", fix=FIX)
        raise ConfigError("weights", [problem], consequence=_NOT_READ)
    check_writable(file, option="--propose", asked_by="weights", consequence=_NOT_READ)
