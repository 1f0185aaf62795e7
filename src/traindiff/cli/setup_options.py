"""The options of `traindiff verify` that say how the candidate is run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from typer.core import TyperCommand

from traindiff.cli.app import says_what_is_wrong
from traindiff.run.config.setup import DTYPES, ENGINES, OFFLOAD_DEVICES, OPTIMIZERS

if TYPE_CHECKING:
    from traindiff.run.processes.present_ranks import PresentRanks


_ALSO = {"--iterations": "--steps"}
_STANDS_FOR = {"--use-torch-adam": ("--optimizer", "torch")}
_OF_LAUNCHERS = "--local-rank"
"""Added by the `deepspeed` launcher; the environment says the same."""


class OtherSpellings(TyperCommand):
    """A command that takes its options in other spellings too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `spelled_as_here`."""
        return super().parse_args(ctx, list(spelled_as_here(args)))


def spelled_as_here(arguments: Sequence[str]) -> Iterator[str]:
    """The same arguments as the command spells them: `--zero_stage` is `--zero-stage`, `--iterations` is `--steps`."""
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            yield argument
            yield from waiting
            return
        if not argument.startswith("--"):
            yield argument
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        name = _ALSO.get(name, name)
        if name == _OF_LAUNCHERS:
            if not equals:
                next(waiting, None)
        else:
            yield from _STANDS_FOR.get(name, (f"{name}{equals}{value}",))


@dataclass(slots=True)
class RunBar:
    """A bar over all steps of all runs; called when one of them has taken a step."""

    _bar: Progress
    _task: TaskID
    _known: int
    _begun: dict[str, int] = field(default_factory=dict)
    _done: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str, step: int, count: int) -> None:
        """A run has taken a step, as `traindiff.run.verify.runs.Progress` has it."""
        self._begun[name], self._done[name] = count, step
        total = max(self._known, sum(self._begun.values()))
        self._bar.update(self._task, description=name, completed=sum(self._done.values()), total=total)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Inside it, something else is printed."""
        self._bar.stop()
        yield
        self._bar.start()


@contextmanager
def run_progress(console: Console, *, steps: int, shown: bool = True) -> Iterator[RunBar]:
    """Show a bar over all steps of all runs; without a terminal, nothing.

    Args:
        console: Where to.
        steps: How many are known to come. Those of further runs are added when they begin.
        shown: Whether there is to be one.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        yield RunBar(bar, bar.add_task("starting", total=steps), steps)


_LAST_SECONDS = 1.0
"""torchrun ends the others as soon as one rank fails, so that rank 0 should be the first."""


def on_rank_0(command: Callable[[PresentRanks | None], int]) -> int:
    """The exit code of a command that rank 0 runs, while other ranks run what it launches.

    Args:
        command: Is given the ranks that are there already, None without a launcher. Prints, and returns an exit code.
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
    """What the command returns, or exits with."""
    try:
        code: int = says_what_is_wrong(command)()
    except typer.Exit as ends:
        return ends.exit_code
    return code


_PANEL = "How the candidate is run"


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
        settings = {"parser": _choice(kind, known, prefix=prefix), "metavar": "|".join(known), **settings}
    return typer.Option(*((flag,) if flag else ()), help=help_, rich_help_panel=_PANEL, **settings)


EngineOption = Annotated[
    str | None,
    _option("What divides the training among ranks. plain if left out.", ENGINES, kind="an engine"),
]
BaselineEngineOption = Annotated[
    str,
    _option("What the trusted training is run under, on as many ranks.", ENGINES, kind="an engine"),
]
NprocOption = Annotated[int | None, _option("Number of ranks. 2 if left out and the engine divides.", min=1)]
ZeroStageOption = Annotated[int | None, _option("Stage of DeepSpeed's ZeRO; implies --engine deepspeed.", min=0, max=3)]
OffloadOption = Annotated[
    str | None,
    _option(
        "Where DeepSpeed keeps the optimizer's state; implies --engine deepspeed.", OFFLOAD_DEVICES,
        kind="a place to offload to",
    ),
]  # fmt: skip
DtypeOption = Annotated[
    str,
    _option(
        "In which the model computes, in the trusted training too.", DTYPES,
        kind="a dtype", prefix="torch.",
    ),
]  # fmt: skip
OptimizerOption = Annotated[
    str, _option("The recipe's own, or the engine's implementation of it.", OPTIMIZERS, kind="a choice")
]
CompileOption = Annotated[bool, _option("Compile the model.", flag="--compile")]
DeepcompileOption = Annotated[
    bool, _option("Let DeepSpeed's DeepCompile change the compiled graphs.", flag="--deepcompile")
]
VerboseLoggingOption = Annotated[
    bool, _option("Gather what torch's compiler says: guards, recompilations, graph breaks.", flag="--verbose-logging")
]
AccumulationOption = Annotated[int, _option("Micro-batches in which each rank computes its part of a batch.", min=1)]
ClippingOption = Annotated[float, _option("Largest norm of all gradients, on both sides; 0 for none.", min=0.0)]
LossScaleOption = Annotated[
    float | None, _option("What the loss is multiplied by, on both sides; 0 for a dynamic scale.", min=0.0)
]
