"""The options of `traindiff verify` that say how the candidate is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from traindiff.setups.setup import DTYPES, ENGINES, OFFLOAD_DEVICES, OPTIMIZERS

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
