"""The options of commands that run two trainings, and how such commands show their progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from traindiff.cli.app import says_what_is_wrong
from traindiff.cli.options import RUNS, SETUP
from traindiff.run.config.options import LIKE, STEPS, STEPS_LIKE, like
from traindiff.run.config.setup import DTYPES, ENGINES, OFFLOAD_DEVICES, OPTIMIZERS

if TYPE_CHECKING:
    from traindiff.run.processes.present_ranks import PresentRanks


def spelled_as_here(name: str) -> str:
    """An option's name in our spelling: `--zero_stage` is `--zero-stage`, and `--iterations` is `--steps`."""
    name = name.replace("_", "-")
    return "steps" if name == "iterations" else name


OTHER_SPELLINGS: dict[str, Any] = {"token_normalize_func": spelled_as_here}
"""Settings of a command that takes its options in the spellings of other tools, too."""

CandidateOption = Annotated[
    str,
    typer.Option(metavar="RECIPE", rich_help_panel=RUNS, help="The training in question. The same again if left out."),
]
BatchesOption = Annotated[
    int | None,
    typer.Option(
        "--steps",
        min=1,
        metavar="N",
        rich_help_panel=RUNS,
        help=f"Batches to train on in each run. {STEPS} if left out.",
    ),
]
ReplicaOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KIND:SEED",
        rich_help_panel=RUNS,
        help="Replica of the baseline to measure its noise from. Repeatable; ulp:1, ulp:2, reorder:1 if left out, "
        "and channel:1 for a model with BatchNorm.",
    ),
]


def _choice(kind: str, known: tuple[str, ...], *, prefix: str = "") -> Callable[[str], str]:
    def parse(found: str) -> str:
        if (name := found.removeprefix(prefix)) not in known:
            raise typer.BadParameter(f"{found!r} is not {kind}. Known: {', '.join(known)}.")
        return name

    return parse


def _option(
    help_: str, known: tuple[str, ...] = (), *, kind: str = "", prefix: str = "", flag: str = "", **settings: Any
) -> Any:
    if known:
        settings = {
            "parser": _choice(kind, known, prefix=prefix), "metavar": "|".join(known),
            "autocompletion": lambda: list(known), **settings,
        }  # fmt: skip
    return typer.Option(*((flag,) if flag else ()), help=help_, rich_help_panel=SETUP, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupOptions:
    """The options that say how the trainings are run (`traindiff.run.config.setup.Setup`), with their defaults."""

    engine: Annotated[
        str | None, _option("What divides the training among ranks. plain if left out.", ENGINES, kind="an engine")
    ] = None
    like: Annotated[
        str | None,
        _option(
            "Take the defaults of DeepSpeed's compare_loss.py: ZeRO stage 1 against DDP (traindiff explain verify).",
            LIKE,
            kind="a program that is known",
        ),
    ] = None
    baseline_engine: Annotated[
        str | None,
        _option(
            "What the trusted training is run under, on as many ranks. plain if left out.", ENGINES, kind="an engine"
        ),
    ] = None
    baseline_compile: Annotated[
        bool | None, _option("Compile the model of the trusted training too.", flag="--baseline-compile")
    ] = None
    nproc: Annotated[
        int | None, _option("Number of ranks. 2 if left out and the engine divides.", min=1, metavar="N")
    ] = None
    zero_stage: Annotated[
        int | None, _option("Stage of DeepSpeed's ZeRO; implies --engine deepspeed.", min=0, max=3, metavar="N")
    ] = None
    offload_device: Annotated[
        str | None,
        _option(
            "Where DeepSpeed keeps the optimizer's state; implies --engine deepspeed.",
            OFFLOAD_DEVICES,
            kind="a place to offload to",
        ),
    ] = None
    dtype: Annotated[
        str,
        _option("In which the model computes, in the trusted training too.", DTYPES, kind="a dtype", prefix="torch."),
    ] = "float32"
    optimizer: Annotated[
        str | None,
        _option(
            "torch for the recipe's own, engine for the engine's implementation of it. torch if left out.",
            OPTIMIZERS,
            kind="a choice",
        ),
    ] = None
    use_torch_adam: Annotated[bool, typer.Option("--use-torch-adam", hidden=True)] = False
    compile: Annotated[bool, _option("Compile the model.", flag="--compile")] = False
    deepcompile: Annotated[
        bool, _option("Let DeepSpeed's DeepCompile change the compiled graphs.", flag="--deepcompile")
    ] = False
    gradient_accumulation_steps: Annotated[
        int, _option("Micro-batches in which each rank computes its part of a batch.", min=1, metavar="N")
    ] = 1
    gradient_clipping: Annotated[
        float, _option("Largest norm of all gradients, on both sides; 0 for none.", min=0.0, metavar="NUMBER")
    ] = 0.0
    loss_scale: Annotated[
        float | None,
        _option("What the loss is multiplied by, on both sides; 0 for a dynamic scale.", min=0.0, metavar="NUMBER"),
    ] = None
    local_rank: Annotated[int | None, typer.Option(hidden=True)] = None
    """Given by launchers; the environment says the same."""

    def requested(self) -> dict[str, Any]:
        """The options as `traindiff.run.verify.request.setups` takes them.

        Raises:
            typer.BadParameter: If the optimizer is named twice, and not the same one.
        """
        options = asdict(self)
        del options["local_rank"], options["like"]
        if options.pop("use_torch_adam"):
            if self.optimizer == "engine":
                raise typer.BadParameter(
                    "--use-torch-adam means --optimizer torch, so it cannot be given with --optimizer engine. "
                    "Leave one of them out."
                )
            options["optimizer"] = "torch"
        return like(self.like, options) if self.like else options

    def steps(self, given: int | None) -> int:
        """The number of batches of a run."""
        return given or STEPS_LIKE.get(self.like or "", STEPS)


OF_BASELINE = ("baseline_engine", "baseline_compile")
"""The options that only a command with a trusted training has."""


def with_setup_options(command: Callable[..., Any], *, without: Collection[str] = ()) -> Callable[..., Any]:
    """The command with the options of `SetupOptions`, except those named, in place of its parameter `options`."""
    types = get_type_hints(SetupOptions, include_extras=True)
    options = [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=types[one.name])
        for one in fields(SetupOptions)
        if one.name not in without
    ]
    own = signature(command, eval_str=True)
    parameters: list[Parameter] = []
    for one in own.parameters.values():
        parameters += options if one.name == "options" else [one.replace(kind=Parameter.KEYWORD_ONLY)]

    @wraps(command)
    def run(**values: Any) -> Any:
        chosen = SetupOptions(**{option.name: values.pop(option.name) for option in options})
        return command(**values, options=chosen)

    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


@dataclass(slots=True)
class RunBar:
    """A progress bar over all steps of all runs, which is called after each step."""

    _bar: Progress
    _task: TaskID
    _known: int
    _begun: dict[str, int] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str, step: int, count: int) -> None:
        """Count a step of a run, as `traindiff.run.verify.runs.Progress` is called."""
        self._begun[name], self._done[name] = count, step
        total = max(self._known, sum(self._begun.values()))
        self._bar.update(self._task, description=name, completed=sum(self._done.values()), total=total)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bar while something else is printed."""
        self._bar.stop()
        yield
        self._bar.start()


@contextmanager
def run_progress(console: Console, *, steps: int) -> Iterator[RunBar]:
    """Show a progress bar over all steps of all runs, if there is a terminal.

    Args:
        console: Where to show it.
        steps: Number of steps that are known to come. Steps of further runs are added when these begin.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield RunBar(bar, bar.add_task("starting", total=steps), steps)


_LAST_SECONDS = 1.0
"""Time that other ranks wait after a failure: torchrun ends all ranks when one fails, so rank 0 should end first."""


def on_rank_0(command: Callable[[PresentRanks | None], int]) -> int:
    """The exit code of a command that runs on rank 0, while other ranks run what it launches.

    Args:
        command: Prints, and returns an exit code. Its argument is the ranks of a launcher, None without a launcher.
    """
    from traindiff.run.processes.present_ranks import PresentRanks

    ranks = PresentRanks.found()
    if ranks is None:
        return command(None)
    code = ranks.together(lambda: _exit_code(lambda: command(ranks)))
    if code and not ranks.leads:
        time.sleep(_LAST_SECONDS)
    return code


def _exit_code(command: Callable[[], int]) -> int:
    """The exit code of the command, whether it returns or raises it."""
    try:
        code: int = says_what_is_wrong(command)()
    except typer.Exit as ends:
        return ends.exit_code
    return code
