"""What the floors of a step need to know of earlier steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from traindiff.merging.step_table import Key


@dataclass(slots=True)
class RunFloors:
    """What the floors of later steps need to know of earlier ones.

    Attributes:
        gradients: Largest relative difference of each parameter's gradients so far in the run.
        adaptive: Parameters whose optimizer keeps a moment that it divides by.
        settings_differ: Whether the optimizers are set differently.
        coefficients: Relative error that the optimizers' own coefficients may have.
        states: Norm of each running average of an optimizer after the latest step.
        parted: Whether anything has exceeded its measured floor: then inputs no longer agree within
            noise, and what follows from that is no further divergence.
        permuted: Parameters that started with the same values in another order.
        learning_differs: Whether a loss, a gradient or an update differs by more than its own rounding, and
            more than replicas do; of permuted parameters, whether its norm does.
        learning_apart: Relative difference of all gradients of a step together, in the step where it is largest.
    """

    gradients: dict[str, float] = field(default_factory=dict)
    adaptive: set[str] = field(default_factory=set)
    settings_differ: bool = False
    coefficients: float = 0.0
    states: dict[Key, float] = field(default_factory=dict)
    parted: bool = False
    permuted: set[str] = field(default_factory=set)
    learning_differs: bool = False
    learning_apart: float = 0.0
