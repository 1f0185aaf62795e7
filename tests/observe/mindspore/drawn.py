"""The same initial weights and batches for every framework, drawn by NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FEATURES, HIDDEN, CLASSES = 12, 24, 5
SAMPLES, STEPS = 16, 4

Array = NDArray[np.float32]


def weights() -> dict[str, Array]:
    """By torch's names; matrices as (outputs, inputs)."""
    draw = np.random.default_rng(7)

    def uniform(*shape: int) -> Array:
        return draw.uniform(-0.3, 0.3, shape).astype(np.float32)

    return {
        "first.weight": uniform(HIDDEN, FEATURES),
        "first.bias": uniform(HIDDEN),
        "norm.weight": 1 + uniform(HIDDEN),
        "norm.bias": uniform(HIDDEN),
        "last.weight": uniform(CLASSES, HIDDEN),
        "last.bias": uniform(CLASSES),
    }


def batches() -> list[tuple[Array, NDArray[np.int32]]]:
    """Inputs and labels, step by step."""
    draw = np.random.default_rng(8)
    return [
        (
            draw.standard_normal((SAMPLES, FEATURES)).astype(np.float32),
            draw.integers(0, CLASSES, SAMPLES).astype(np.int32),
        )
        for _ in range(STEPS)
    ]
