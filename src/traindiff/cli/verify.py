"""`traindiff verify`."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from traindiff.cli.app import app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.given import chosen_format, refuse_here
from traindiff.cli.options import (
    RUNS,
    SHOWN,
    AcceptOption,
    AtolOption,
    FormatOption,
    IdenticalOption,
    IgnoreOption,
    JsonOption,
    MapOption,
    RenameOption,
    RtolOption,
    SeedOption,
    TimeoutOption,
    TopOption,
)
from traindiff.cli.resume import print_resumed
from traindiff.cli.setup_options import (
    OTHER_SPELLINGS,
    BatchesOption,
    CandidateOption,
    ReplicaOption,
    SetupOptions,
    on_rank_0,
    run_progress,
    with_setup_options,
)


class PinWhen(StrEnum):
    """When to pin the fault down."""

    divergence = "divergence"
    always = "always"
    never = "never"


_NOT_RESUMED = (
    "baseline_engine", "baseline_compile", "rename", "layout", "accept", "ignore", "rtol", "atol", "identical",
    "replica", "repeat", "pin", "zoom", "matrix", "fresh", "verbose_logging",
)  # fmt: skip
"""Parameters that have no effect with `--resume-at`: nothing but the candidate is run."""


@app.command(context_settings=OTHER_SPELLINGS, short_help="Run two trainings, compare them, pin the fault down.")
@says_what_is_wrong
@with_setup_options
def verify(
    context: typer.Context,
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="The trusted training: FILE.py:FUNCTION or MODULE:FUNCTION that returns a traindiff.Training. "
            "The demo's GPT if left out.",
        ),
    ] = "traindiff.run.demo.recipes:gpt",
    candidate: CandidateOption = "",
    rename: RenameOption = None,
    layout: MapOption = None,
    accept: AcceptOption = None,
    ignore: IgnoreOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    identical: IdenticalOption = False,
    steps: BatchesOption = None,
    seed: SeedOption = 0,
    replica: ReplicaOption = None,
    repeat: Annotated[bool, typer.Option(rich_help_panel=RUNS, help="Also run the baseline again as it is.")] = True,
    pin: Annotated[
        PinWhen,
        typer.Option(
            metavar="|".join(PinWhen),
            rich_help_panel=RUNS,
            help="When to run a step again with forced tensors, to judge each operation alone.",
        ),
    ] = PinWhen.divergence,
    zoom: Annotated[
        bool,
        typer.Option(
            "--zoom",
            rich_help_panel=RUNS,
            help="Where a module is wrong alone, name the first operator inside it (traindiff explain operators).",
        ),
    ] = False,
    resume_at: Annotated[
        int | None,
        typer.Option(
            "--resume-at",
            min=1,
            metavar="N",
            rich_help_panel=RUNS,
            help="Save the candidate after N steps, load it in fresh processes, train on, and compare it with itself "
            "without a stop, as traindiff resume does.",
        ),
    ] = None,
    matrix: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=RUNS,
            help="Verify every combination of the grid in this file, TOML or JSON (traindiff explain verify).",
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", rich_help_panel=RUNS, help="Run combinations again that are finished.")
    ] = False,
    verbose_logging: Annotated[
        bool,
        typer.Option(
            "--verbose-logging",
            rich_help_panel=RUNS,
            help="Gather what torch's compiler says: guards, recompilations, graph breaks.",
        ),
    ] = False,
    timeout: TimeoutOption = None,
    *,
    options: SetupOptions,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIRECTORY", rich_help_panel=SHOWN, help="Directory of the recordings."),
    ] = Path("traindiff-verify"),
    top: TopOption = 12,
    form: FormatOption = "text",
    as_json: JsonOption = False,
) -> None:
    """Run a trusted training and the one in question, compare them, and pin down what is wrong.

    Floors are measured: the trusted training is run again as it is, and in replicas that are perturbed within
    rounding. Where the runs diverge, the step is run again with every tensor forced to the baseline's, which
    names each operation that is wrong by itself. Exits like traindiff compare.
    """
    from traindiff.present.text.results import print_matrix, print_report
    from traindiff.run.config.options import setups
    from traindiff.run.processes.present_ranks import PresentRanks, launched_ranks
    from traindiff.run.verify.matrix import read_grid, verify_matrix
    from traindiff.run.verify.request import VerifyRequest
    from traindiff.run.verify.runs import REPLICAS
    from traindiff.run.verify.verify import run_request

    form = chosen_format(context, form, as_json=as_json)
    given, num_steps = options.requested(), options.steps(steps)
    replicas = REPLICAS if replica is None else tuple(replica)

    if resume_at is not None:
        _refuse_with_resume_at(context, form)
        _, setup = setups(given, world_size=None)
        code = print_resumed(
            candidate or recipe, output, at=resume_at, steps=num_steps, setup=setup, resumed_ranks=setup.nproc,
            seed=seed, timeout=timeout, top=top, as_json=form == "json",
        )  # fmt: skip
        raise typer.Exit(code)
    if matrix is None:
        refuse_here(
            context, ("fresh",), what="is for combinations, and there is no --matrix.",
            fix="Give the file of a grid with --matrix, or leave it out.", consequence="nothing was run",
        )  # fmt: skip

    def decide(ranks: PresentRanks | None) -> int:
        baseline_setup, setup = setups(given, world_size=launched_ranks())
        request = VerifyRequest(
            recipe=recipe, candidate=candidate or recipe, output=output, baseline_setup=baseline_setup,
            setup=setup, steps=num_steps, seed=seed, repeat=repeat, replicas=replicas, pin=pin.value, zoom=zoom,
            rename=rename, map=layout, accept=accept, ignore=ignore or (), rtol=rtol, atol=atol, identical=identical,
            compiler_logs=verbose_logging, timeout=timeout,
        )  # fmt: skip
        if matrix is not None:
            rows = verify_matrix(
                request, read_grid(matrix, given), fresh=fresh, ranks=ranks,
                on_row=lambda row: messages.print(f"{row.name}: {row.verdict}", markup=False, soft_wrap=True),
            )  # fmt: skip
            print_result(rows, form, text=lambda: print_matrix(results, rows))
            return rows.exit_code
        with run_progress(messages, steps=(2 + repeat + len(replicas)) * num_steps) as on_step:
            result = run_request(replace(request, progress=on_step), ranks)
        print_result(result, form, text=lambda: print_report(results, result, top=top))
        return result.exit_code

    raise typer.Exit(on_rank_0(decide))


def _refuse_with_resume_at(context: typer.Context, form: str) -> None:
    """Raise `ConfigError` if an option was given that a resumed training does not follow."""
    what = "has no effect with --resume-at, which compares the candidate with itself."
    fix = "Leave out one of the two."
    unused = (*_NOT_RESUMED, "form") if form not in ("text", "json") else _NOT_RESUMED
    refuse_here(context, unused, what=what, fix=fix, consequence="nothing was run")
