"""What is printed, line by line, in the format that ModelStepper's users read already."""

from __future__ import annotations

import re

from torch import nn

from tests.run.lockstep.sides import altered, batches, plain, scaled, stepped


def masked(printed: str) -> str:
    """The text with every digit of a number that is measured as #."""
    return re.sub(
        r"(?<=_loss=|_diff=)\S+|tol=\S+$|tol=\S+(?= )", lambda match: re.sub(r"\d", "#", match[0]), printed, flags=re.M
    )


CONFIGURATION = """\
--- Model Stepper Configuration ---
batches=2
test_every=1
status_every=5
track_params=True
param_tol=1.000000e-05
track_loss=True
loss_tol=1.000000e-05
track_grads=True
grad_tol=1.000000e-05

"""
TOLERANCES = {"param_tol": 1e-5, "loss_tol": 1e-5, "grad_tol": 1e-5}


def test_a_run_that_passes() -> None:
    _, printed = stepped(plain(), plain(), batches(2), **TOLERANCES)

    assert printed.startswith(CONFIGURATION)
    assert masked(printed.removeprefix(CONFIGURATION)) == (
        "STATUS batch=0 / 2 base_loss=#.##### test_loss=#.##### abs_diff=#.#####e+## rel_diff=#.#####e+##\n"
        "STATUS batch=1 / 2 base_loss=#.##### test_loss=#.##### abs_diff=#.#####e+## rel_diff=#.#####e+##\n"
        "TEST PASSED\n"
    )


def test_a_run_that_fails() -> None:
    _, printed = stepped(plain(), altered(plain(), scaled(1.5)), batches(2), **TOLERANCES, select="head.*")

    assert masked(printed.removeprefix(CONFIGURATION)) == (
        "DIVERGED GRADIENT rank=0 batch=0 grad_idx=0 name=head.weight abs_diff=#.#####e-## rel_diff=#.#####e-## "
        "tol=#.#####e-##\n"
        "  The candidate's is 1.5 x the baseline's.\n"
        "STATUS batch=0 / 2 base_loss=#.##### test_loss=#.##### abs_diff=#.#####e+## rel_diff=#.#####e+##\n"
        "TEST FAILED\n"
    )


def test_many_divergences_of_one_kind_are_counted() -> None:
    def other_gradients(model: nn.Module, _number: int) -> None:
        for parameter in model.parameters():
            parameter.grad.view(-1)[::2].mul_(1.2)

    comparison, printed = stepped(
        plain(), altered(plain(), other_gradients), batches(2), **TOLERANCES, track_params=True
    )

    lines = [line for line in printed.splitlines() if line.startswith("DIVERGED GRADIENT")]
    assert len(lines) == 8
    told = [finding for finding in comparison.findings if finding.phase == "grad" and finding.slot == "grad"]
    assert f"  The same holds for {len(told) - 8} more." in printed.splitlines()
