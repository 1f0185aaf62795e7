"""The options of setups that users give, and the two setups that follow from them. Needs no framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from traindiff.run.config.setup import Setup, baseline_setup

SETUP_OPTIONS = (*(one.name for one in fields(Setup)), "baseline_engine", "baseline_compile")
"""The options of a setup that a user may give: settings of the candidate's, and how the baseline is run."""

LIKE = ("compare_loss",)
"""Other programs whose defaults `like` knows."""

STEPS, STEPS_LIKE = 4, {"compare_loss": 5}
"""Default number of batches of a run."""


def like(program: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a setup with the defaults of another program for those that were left out.

    `compare_loss` is DeepSpeed's script that checks ZeRO: stage 1 against DDP, DeepSpeed's own Adam, and both sides
    compiled if compiling is asked for. DeepCompile changes the state of torch's compiler, so only its side is compiled.

    Args:
        program: One of `LIKE`.
        options: Values of `SETUP_OPTIONS`; None for those that were left out.
    """
    assert program in LIKE
    given = {name: value for name, value in options.items() if value is not None}
    both = bool(given.get("compile")) and not given.get("deepcompile")
    defaults = {"engine": "deepspeed", "baseline_engine": "ddp", "optimizer": "engine", "baseline_compile": both}
    if given.get("engine", "deepspeed") == "deepspeed":
        defaults["zero_stage"] = 1
    return {**defaults, **given}


def setups(options: Mapping[str, Any], *, world_size: int | None) -> tuple[Setup, Setup]:
    """The setups of baseline and candidate, with defaults for options that were left out.

    The baseline is plain PyTorch, or runs under `baseline_engine` on as many ranks as the candidate.

    Args:
        options: Values of `SETUP_OPTIONS`; None for those that were left out.
        world_size: Number of ranks that exist already; None if none do.
    """
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    trusted, nproc = given.pop("baseline_engine", "plain"), given.pop("nproc", None)
    is_compiled = given.pop("baseline_compile", False)
    of_deepspeed = "zero_stage" in given or "offload_device" in given or given.get("deepcompile")
    engine: Any = given.pop("engine", None) or ("deepspeed" if of_deepspeed else "plain")
    candidate = Setup(engine=engine, nproc=nproc or (1 if engine == "plain" else world_size or 2), **given)
    if trusted == "plain":
        return replace(baseline_setup(candidate), compile=is_compiled), candidate
    baseline = Setup(
        engine=trusted, dtype=candidate.dtype,
        nproc=candidate.nproc if candidate.nproc > 1 else nproc or world_size or 2,
        precision=baseline_setup(candidate).precision if trusted == "ddp" else "autocast",
        gradient_accumulation_steps=candidate.gradient_accumulation_steps,
        gradient_clipping=candidate.gradient_clipping, loss_scale=candidate.loss_scale, compile=is_compiled,
    )  # fmt: skip
    return baseline, candidate
