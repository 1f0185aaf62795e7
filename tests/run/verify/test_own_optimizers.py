"""An engine's implementation of Adam that rounds its coefficients otherwise than torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.run.verify import divided
from tests.run.verify.conftest import Verify
from traindiff import Training

TOO_SMALL = (1.0 - float(torch.tensor(0.999))) / (1.0 - 0.999)
"""1 - beta of a beta in float32, as a share of what it should be: 1.3e-5 too small."""


class FusedAdam(torch.optim.AdamW):
    """Makes the second moment of a first step as DeepSpeed's optimizer of this name does."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for state in self.state.values():
            state["exp_avg_sq"] *= TOO_SMALL
        return result


class OurAdam(FusedAdam):
    """The same, of which nobody knows that it computes so."""


def with_optimizer(made: type[torch.optim.AdamW]) -> Training:
    training = divided.recipe()
    return Training(
        model=training.model, optimizer=made(training.model.parameters(), lr=1e-2), batches=training.batches,
        loss=training.loss,
    )  # fmt: skip


def fused() -> Training:
    return with_optimizer(FusedAdam)


def ours() -> Training:
    return with_optimizer(OurAdam)


@pytest.mark.parametrize(("candidate", "verdict"), [(fused, "equivalent"), (ours, "diverged")])
def test_coefficients_in_float32_are_noise_of_optimizers_that_are_known_for_them(
    candidate: Any, verdict: str, verify: Verify
) -> None:
    found = verify(candidate, divided.recipe, steps=1, replicas=("ulp:1", "ulp:2"), pin="never")

    assert found.verdict == verdict, str(found)
