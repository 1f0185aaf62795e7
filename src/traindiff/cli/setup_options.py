"""The options of `traindiff verify` that say how the candidate is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from traindiff.setups.setup import Setup

_ENGINES = ("plain", "ddp", "fsdp1", "fsdp2", "tp", "pp", "deepspeed")
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
    _option("What divides the training among ranks. plain if left out.", _ENGINES, kind="an engine"),
]
BaselineEngineOption = Annotated[
    str,
    _option("What the trusted training is run under, on as many ranks.", _ENGINES, kind="an engine"),
]
NprocOption = Annotated[int | None, _option("Number of ranks. 2 if left out and the engine divides.", min=1)]
ZeroStageOption = Annotated[int | None, _option("Stage of DeepSpeed's ZeRO; implies --engine deepspeed.", min=0, max=3)]
OffloadOption = Annotated[
    str | None,
    _option(
        "Where DeepSpeed keeps the optimizer's state; implies --engine deepspeed.", ("none", "cpu", "nvme"),
        kind="a place to offload to",
    ),
]  # fmt: skip
DtypeOption = Annotated[
    str,
    _option(
        "In which the model computes, in the trusted training too.", ("float32", "bfloat16", "float16"),
        kind="a dtype", prefix="torch.",
    ),
]  # fmt: skip
OptimizerOption = Annotated[
    str, _option("The recipe's own, or the engine's implementation of it.", ("torch", "engine"), kind="a choice")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedSetup:
    """What was asked for, options that were left out as None.

    Attributes:
        engine: See `Setup`.
        baseline_engine: Of the trusted training.
        nproc: See `Setup`.
        zero_stage: See `Setup`.
        offload_device: See `Setup`.
        further: Further settings of a `Setup`.
    """

    engine: str | None
    baseline_engine: str
    nproc: int | None
    zero_stage: int | None
    offload_device: str | None
    further: dict[str, Any]


def candidate_setup(asked: AskedSetup, *, world_size: int | None) -> Setup:
    """The setup of the candidate: what was left out follows from the rest.

    Args:
        asked: What was asked for.
        world_size: Number of ranks that are there already; None where none are.
    """
    from traindiff.setups.setup import Setup

    of_deepspeed = asked.zero_stage is not None or asked.offload_device is not None or asked.further["deepcompile"]
    engine: Any = asked.engine or ("deepspeed" if of_deepspeed else "plain")
    usual = 1 if engine == "plain" else world_size or 2
    offload: Any = asked.offload_device or "none"
    return Setup(
        engine=engine, nproc=asked.nproc or usual, zero_stage=asked.zero_stage or 0, offload_device=offload,
        **asked.further,
    )  # fmt: skip


def trusted_setup(asked: AskedSetup, candidate: Setup) -> Setup:
    """The setup of the baseline: plain, or under the engine that was asked for, on as many ranks."""
    from traindiff.setups.setup import Setup, baseline_setup

    if asked.baseline_engine == "plain":
        return baseline_setup(candidate)
    engine: Any = asked.baseline_engine
    plain = Setup(engine=engine, nproc=candidate.nproc if candidate.nproc > 1 else asked.nproc or 2)
    return replace(
        plain, dtype=candidate.dtype, gradient_accumulation_steps=candidate.gradient_accumulation_steps,
        gradient_clipping=candidate.gradient_clipping, loss_scale=candidate.loss_scale,
    )  # fmt: skip
