"""From what a user asked for to the setups of candidate and baseline."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from traindiff.setups.setup import Setup, baseline_setup


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

    engine: str | None = None
    baseline_engine: str = "plain"
    nproc: int | None = None
    zero_stage: int | None = None
    offload_device: str | None = None
    further: dict[str, Any] = field(default_factory=dict)


def candidate_setup(asked: AskedSetup, *, world_size: int | None) -> Setup:
    """The setup of the candidate: what was left out follows from the rest.

    Args:
        asked: What was asked for.
        world_size: Number of ranks that are there already; None where none are.
    """
    of_deepspeed = asked.zero_stage is not None or asked.offload_device is not None or asked.further.get("deepcompile")
    engine: Any = asked.engine or ("deepspeed" if of_deepspeed else "plain")
    usual = 1 if engine == "plain" else world_size or 2
    offload: Any = asked.offload_device or "none"
    return Setup(
        engine=engine, nproc=asked.nproc or usual, zero_stage=asked.zero_stage or 0, offload_device=offload,
        **asked.further,
    )  # fmt: skip


def trusted_setup(asked: AskedSetup, candidate: Setup) -> Setup:
    """The setup of the baseline: plain, or under the engine that was asked for, on as many ranks."""
    if asked.baseline_engine == "plain":
        return baseline_setup(candidate)
    engine: Any = asked.baseline_engine
    plain = Setup(engine=engine, nproc=candidate.nproc if candidate.nproc > 1 else asked.nproc or 2)
    return replace(
        plain, dtype=candidate.dtype, gradient_accumulation_steps=candidate.gradient_accumulation_steps,
        gradient_clipping=candidate.gradient_clipping, loss_scale=candidate.loss_scale,
    )  # fmt: skip
