"""`traindiff resume`."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traindiff.cli.app import app, messages, results, says_what_is_wrong
from traindiff.cli.options import RUNS, SHOWN, JsonOption, SeedOption, TimeoutOption, TopOption
from traindiff.cli.setup_options import (
    OF_BASELINE,
    OTHER_SPELLINGS,
    BatchesOption,
    SetupOptions,
    run_progress,
    with_setup_options,
)

if TYPE_CHECKING:
    from traindiff.analyse.compare.resumption import Resumption
    from traindiff.run.config.setup import Setup


def _ranks(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,5})(?::([1-9]\d{0,5}))?", text)
    if not match:
        raise typer.BadParameter(f"{text!r} is not a number of ranks. Write 2, or 2:4 for 2 before saving and 4 after.")
    return int(match[1]), int(match[2] or match[1])


def print_resumed(
    recipe: str, output: Path, *, at: int, steps: int, setup: Setup, resumed_ranks: int, seed: int,
    timeout: float | None, top: int, as_json: bool,
) -> int:  # fmt: skip
    """Run a resume, print its result, and return the exit code."""
    from traindiff.present.data import write_json
    from traindiff.present.text.resumption import print_resumption
    from traindiff.run.resume.resume import resume as run_resume

    with run_progress(messages, steps=2 * (at + steps)) as on_step:
        result: Resumption = run_resume(
            recipe, output, at=at, steps=steps, setup=setup, resumed_ranks=resumed_ranks, seed=seed, timeout=timeout,
            progress=on_step,
        )  # fmt: skip
    if as_json:
        write_json(result, sys.stdout)
    else:
        print_resumption(results, result, top=top)
    return result.exit_code


@app.command(context_settings=OTHER_SPELLINGS, short_help="Save, load in a fresh process, train on: is it the same?")
@says_what_is_wrong
@partial(with_setup_options, without=OF_BASELINE)
def resume(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="FILE.py:FUNCTION or MODULE:FUNCTION that returns a traindiff.Training."),
    ],
    at: Annotated[
        int, typer.Option("--at", min=1, metavar="N", rich_help_panel=RUNS, help="Steps to train before saving.")
    ],
    steps: BatchesOption = None,
    seed: SeedOption = 0,
    ranks: Annotated[
        str,
        typer.Option(
            metavar="N[:M]",
            rich_help_panel=RUNS,
            help="Ranks that train and save, and ranks that load and train on. As --nproc if left out.",
        ),
    ] = "",
    timeout: TimeoutOption = None,
    *,
    options: SetupOptions,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIRECTORY",
            rich_help_panel=SHOWN,
            help="Directory of recordings and checkpoint.",
        ),
    ] = Path("traindiff-resume"),
    top: TopOption = 12,
    as_json: JsonOption = False,
) -> None:
    """Train, save, load in fresh processes and train on; compare with a training that never stopped.

    Everything must be as it was saved before the first step after loading. Exits with 0 if the training goes on as
    if it had never stopped, 1 if it does not, 2 if the input cannot be used, and 3 if not all could be compared.
    """
    from traindiff.run.config.options import setups

    _, setup = setups(options.requested(), world_size=None)
    before, after = _ranks(ranks) if ranks else (setup.nproc, setup.nproc)
    code = print_resumed(
        recipe, output, at=at, steps=options.steps(steps), setup=replace(setup, nproc=before), resumed_ranks=after,
        seed=seed, timeout=timeout, top=top, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(code)
