"""Known faults, each injected into the running training and taken back afterwards.

A fault changes what the training computes, never what traindiff sees of it. The place where it
first shows is part of its definition, and tested.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from traindiff.errors import ConfigError, Problem
from traindiff.run.demo.faults import batches, forward, gradients, optimizers
from traindiff.run.demo.faults.fault import Fault, FirstSight

__all__ = ["DEFAULT", "FAULTS", "Fault", "FirstSight", "find_fault"]

FAULTS: Mapping[str, Fault] = MappingProxyType(
    {
        fault.name: fault
        for fault in (
            gradients.lost_gradient,
            gradients.gradient_scale,
            gradients.missing_zero_grad,
            gradients.sign_flip,
            gradients.tied_head_lost,
            gradients.frozen_layer,
            forward.gelu_tanh,
            forward.layernorm_eps,
            forward.bfloat16_reduction,
            forward.mask_leak,
            forward.position_offset,
            forward.dropout_seed,
            forward.bit_flip,
            batches.label_shift,
            batches.duplicate_samples,
            optimizers.decay_on_biases,
            optimizers.beta2,
            optimizers.learning_rate,
            optimizers.moments_dropped,
        )
    }
)
"""Faults by name."""

DEFAULT = gradients.lost_gradient.name
"""The fault that the demo shows when none is asked for."""


def find_fault(name: str) -> Fault:
    """The fault of this name.

    Raises:
        ConfigError: There is none; the message names the nearest, and all of them.
    """
    if name not in FAULTS:
        problem = Problem.unknown_name(where=f"fault = {name!r}", kind="a fault", found=name, known=FAULTS)
        raise ConfigError("the demo", [problem], consequence="nothing was trained")
    return FAULTS[name]
