"""`traindiff run`."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any

import typer

from traindiff.cli.app import app, says_what_is_wrong
from traindiff.errors import ConfigError, Problem


class ScriptReady(Exception):  # noqa: N818  not an error
    """Carries the script out of the command line's own handling of errors, which is not for the script's errors.

    Args:
        settings: The arguments of `run_recorded`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings


@app.command(short_help="Record a training script as it is.", context_settings={"allow_interspersed_args": False})
@says_what_is_wrong
def run(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Python file to run, or with -m a module.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="Its arguments.")] = None,
    output: Annotated[str, typer.Option("--output", "-o", help="Directory of the recording.")] = "traindiff-run",
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module, as for python -m.")] = False,
    observe: Annotated[
        str | None, typer.Option(metavar="A,B", help="What to observe (docs/observe.md). All phases, if left out.")
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Paths of modules and parameters, e.g. 'transformer.h.3.*'. Repeatable."),
    ] = None,
    detail: Annotated[
        str, typer.Option(metavar="A,B", help="What to keep of a tensor: summary, exponents, signs, tensors.")
    ] = "summary",
    steps: Annotated[str | None, typer.Option(help='Steps to record, e.g. "0-9,20,30-".')] = None,
    ranks: Annotated[str | None, typer.Option(help='Ranks to record, e.g. "0,8".')] = None,
    every: Annotated[int, typer.Option(min=1, help="Record only every n-th step.")] = 1,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a recording that is already there.")] = False,
    batch_axis: Annotated[int | None, typer.Option(help="The batch axis of all tensors, if it is not 0.")] = None,
    sample_order: Annotated[str, typer.Option(help="How ranks share a batch: blocks or interleaved.")] = "blocks",
    evaluation: Annotated[
        bool, typer.Option("--evaluation", help="Record forward passes without gradients too.")
    ] = False,
    bounds: Annotated[
        str | None, typer.Option(metavar="A,B", help="Count elements of gradients between these, e.g. --bounds=-1,0,1.")
    ] = None,
    run_on_cpu: Annotated[
        bool, typer.Option("--run-on-cpu", help="Copy tensors of other devices to the CPU and summarize them there.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Raise errors of traindiff's own.")] = False,
    replica: Annotated[
        str | None, typer.Option(help="Perturb the training on purpose: ulp:SEED, reorder:SEED, float64.")
    ] = None,
    operators: Annotated[
        list[str] | None,
        typer.Option(metavar="GLOB", help="Modules whose operators are recorded; choose --steps too. Repeatable."),
    ] = None,
) -> None:
    """Run a training script and record what it trains, as traindiff.record does, without a change to the script.

    Everything after SCRIPT is its own. Models and optimizers are found when the training calls them (docs/run.md).
    Exits as the script does, and with 2 if the settings cannot be used.
    """
    from traindiff.core.settings import record_settings
    from traindiff.run.script.run import check_room, of_this_start
    from traindiff.run.script.script import Script

    try:
        settings = record_settings(
            observe=_listed(observe),
            select=select or "*",
            detail=_listed(detail) or "summary",
            steps=steps,
            ranks=_ranks(ranks),
            every=every,
            batch_axis=batch_axis,
            sample_order=sample_order,
            evaluation=evaluation,
            strict=strict,
            replica=replica,
            bounds=_bounds(bounds),
            run_on_cpu=run_on_cpu,
            operators=operators,
        )
    except ConfigError as error:
        raise _of_options(error) from None
    if not output:
        problem = Problem(where="--output", what="is empty.", fix="Write the directory to make, e.g. -o runs/base.")
        raise ConfigError("run", [problem], consequence="nothing was run")
    found = Script(name=script, is_module=is_module, arguments=tuple(arguments or ()))
    found.check()
    output = of_this_start(output)
    check_room(output, overwrite=overwrite)
    raise ScriptReady(script=found, path=output, settings=settings, overwrite=overwrite)


def _listed(value: str | None) -> list[str] | None:
    return None if value is None else [one.strip() for one in value.split(",") if one.strip()]


def _ranks(value: str | None) -> list[int] | None:
    found = _listed(value)
    if found is None or all(one.isdecimal() for one in found):
        return None if found is None else [int(one) for one in found]
    what, fix = "is no list of ranks, counted from 0.", "Write --ranks 0,1, or leave it out to record all of them."
    raise ConfigError("run", [Problem(where=f"--ranks {value}", what=what, fix=fix)], consequence="nothing was run")


def _bounds(value: str | None) -> list[float]:
    try:
        return [float(one) for one in _listed(value) or ()]
    except ValueError:
        what, fix = "is no list of numbers.", "Write --bounds=-1,0,1, or leave it out to count nothing."
        problem = Problem(where=f"--bounds {value}", what=what, fix=fix)
        raise ConfigError("run", [problem], consequence="nothing was run") from None


def _of_options(error: ConfigError) -> ConfigError:
    """The problems with settings of a recording, in the spelling of the command line."""
    spelled = [
        replace(
            problem, where=re.sub(r"^record\((\w+)=.*\)$", lambda name: f"--{name[1].replace('_', '-')}", problem.where)
        )
        for problem in error.problems
    ]
    return type(error)("run", spelled, consequence="nothing was run")
