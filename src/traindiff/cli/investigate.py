"""`traindiff investigate`."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from traindiff.cli.app import JsonOption, app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.setup_options import (
    AccumulationOption,
    BaselineEngineOption,
    ClippingOption,
    CompileOption,
    DeepcompileOption,
    DtypeOption,
    EngineOption,
    LossScaleOption,
    NprocOption,
    OffloadOption,
    OptimizerOption,
    OtherSpellings,
    ZeroStageOption,
    on_rank_0,
)

if TYPE_CHECKING:
    from traindiff.analyse.compare.investigation import Stage


@app.command(cls=OtherSpellings, short_help="Ask everything of two trainings, down to the operator.")
@says_what_is_wrong
def investigate(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="The trusted training: FILE.py:FUNCTION or MODULE:FUNCTION that returns a traindiff.Training.",
        ),
    ],
    candidate: Annotated[
        str, typer.Option(metavar="RECIPE", help="The training in question. The same again if left out.")
    ] = "",
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Directory of the recordings and of the report.")
    ] = Path("traindiff-investigate"),
    steps: Annotated[int, typer.Option(min=1, help="Batches to train on in each run.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of torch's, NumPy's and Python's generators.")] = 0,
    seeds: Annotated[int, typer.Option(min=0, help="Further seeds to run the trusted training with.")] = 2,
    replica: Annotated[
        list[str] | None,
        typer.Option(
            help="Replica of the baseline to measure its noise from. Repeatable; ulp:1, ulp:2, reorder:1 if left out."
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN=REPLACEMENT", help="As in traindiff compare. Repeatable."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that a run may go without ending a step, as in traindiff verify.")
    ] = None,
    engine: EngineOption = None,
    baseline_engine: BaselineEngineOption = "plain",
    nproc: NprocOption = None,
    zero_stage: ZeroStageOption = None,
    offload_device: OffloadOption = None,
    dtype: DtypeOption = "float32",
    optimizer: OptimizerOption = "torch",
    compiled: CompileOption = False,
    deepcompile: DeepcompileOption = False,
    gradient_accumulation_steps: AccumulationOption = 1,
    gradient_clipping: ClippingOption = 0.0,
    loss_scale: LossScaleOption = None,
    top: Annotated[int, typer.Option(min=0, help="Rows of each table.")] = 12,
    as_json: JsonOption = False,
) -> None:
    """Ask everything of a training in question, one stage after the other, and stop where a conclusion is final.

    Does the trusted training repeat itself, how much does its seed matter, does the candidate differ by more than
    noise, does that remain without dropout, with deterministic algorithms, on one thread; which step is the first that
    differs, which site, which modules are wrong alone, which operator inside them. Exits like traindiff verify.
    """
    from traindiff.cli.setup_options import run_progress
    from traindiff.present.text.verification import print_conclusion, print_heading, print_stage
    from traindiff.run.processes.present_ranks import PresentRanks
    from traindiff.run.verify.investigate import Investigating
    from traindiff.run.verify.request import SetupOptions, VerifyRequest, candidate_setup, trusted_setup
    from traindiff.run.verify.runs import REPLICAS

    given = SetupOptions(
        engine=engine, baseline_engine=baseline_engine, nproc=nproc, zero_stage=zero_stage,
        offload_device=offload_device,
        further={
            "dtype": dtype, "optimizer": optimizer, "compile": compiled, "deepcompile": deepcompile,
            "gradient_accumulation_steps": gradient_accumulation_steps, "gradient_clipping": gradient_clipping,
            "loss_scale": loss_scale,
        },
    )  # fmt: skip
    replicas = REPLICAS if replica is None else tuple(replica)

    def decide(ranks: PresentRanks | None) -> int:
        setup = candidate_setup(given, world_size=ranks.world_size if ranks else None)
        with run_progress(messages, steps=(3 + seeds + len(replicas)) * steps) as bar:
            request = VerifyRequest(
                recipe=recipe, candidate=candidate or recipe, output=output, baseline_setup=trusted_setup(given, setup),
                setup=setup, steps=steps, seed=seed, replicas=replicas, zoom=True, rename=rename, timeout=timeout,
                progress=bar, asked_by="investigate",
            )  # fmt: skip
            numbers = count(1)

            def tell(stage: Stage) -> None:
                number = next(numbers)
                with bar.hidden():
                    if number == 1:
                        print_heading(results, request.sides, str(output))
                    print_stage(results, number, stage)

            work = Investigating(request=request, seeds=seeds, ranks=ranks, on_stage=None if as_json else tell)
            found = work.run()
        print_result(found, "json" if as_json else "text", text=lambda: print_conclusion(results, found, top=top))
        return found.exit_code

    raise typer.Exit(on_rank_0(decide))
