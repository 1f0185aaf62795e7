"""`traindiff investigate`."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traindiff.cli.app import app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.options import (
    RUNS,
    SHOWN,
    AcceptOption,
    AtolOption,
    IgnoreOption,
    JsonOption,
    MapOption,
    RenameOption,
    RtolOption,
    SeedOption,
    TimeoutOption,
    TopOption,
)
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

if TYPE_CHECKING:
    from traindiff.analyse.compare.investigation import Stage


@app.command(context_settings=OTHER_SPELLINGS, short_help="Ask everything of two trainings, down to the operator.")
@says_what_is_wrong
@with_setup_options
def investigate(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="The trusted training: FILE.py:FUNCTION or MODULE:FUNCTION that returns a traindiff.Training.",
        ),
    ],
    candidate: CandidateOption = "",
    rename: RenameOption = None,
    layout: MapOption = None,
    accept: AcceptOption = None,
    ignore: IgnoreOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    steps: BatchesOption = None,
    seed: SeedOption = 0,
    seeds: Annotated[
        int,
        typer.Option(min=0, metavar="N", rich_help_panel=RUNS, help="Further seeds to run the trusted training with."),
    ] = 2,
    replica: ReplicaOption = None,
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
            help="Directory of the recordings and of the report.",
        ),
    ] = Path("traindiff-investigate"),
    top: TopOption = 12,
    as_json: JsonOption = False,
) -> None:
    """Ask everything of a training in question, one stage after the other, and stop where a conclusion is final.

    Does the trusted training repeat itself, how much does its seed matter, does the candidate differ by more than
    noise, does that remain without dropout, with deterministic algorithms, on one thread; which step is the first that
    differs, which site, which modules are wrong alone, which operator inside them. Exits like traindiff verify.
    """
    from traindiff.analyse.story import runs_section, stage_section
    from traindiff.present.text.results import print_conclusion, print_section
    from traindiff.run.config.options import setups
    from traindiff.run.processes.present_ranks import PresentRanks, launched_ranks
    from traindiff.run.verify.investigate import Investigating
    from traindiff.run.verify.request import VerifyRequest
    from traindiff.run.verify.runs import REPLICAS

    given, num_steps = options.requested(), options.steps(steps)
    replicas = REPLICAS if replica is None else tuple(replica)

    def decide(ranks: PresentRanks | None) -> int:
        baseline_setup, setup = setups(given, world_size=launched_ranks())
        with run_progress(messages, steps=(3 + seeds + len(replicas)) * num_steps) as bar:
            request = VerifyRequest(
                recipe=recipe, candidate=candidate or recipe, output=output, baseline_setup=baseline_setup,
                setup=setup, steps=num_steps, seed=seed, replicas=replicas, zoom=True, rename=rename, map=layout,
                accept=accept, ignore=ignore or (), rtol=rtol, atol=atol, timeout=timeout, progress=bar,
                asked_by="investigate",
            )  # fmt: skip
            numbers = count(1)

            def tell(stage: Stage) -> None:
                number = next(numbers)
                with bar.hidden():
                    if number == 1:
                        print_section(results, runs_section(request.sides, str(output)))
                        results.print()
                    print_section(results, stage_section(number, stage))
                    results.print()

            work = Investigating(request=request, seeds=seeds, ranks=ranks, on_stage=None if as_json else tell)
            found = work.run()
        print_result(found, "json" if as_json else "text", text=lambda: print_conclusion(results, found, top=top))
        return found.exit_code

    raise typer.Exit(on_rank_0(decide))
