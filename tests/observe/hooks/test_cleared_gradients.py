"""Passes whose gradients are cleared unread, and calls that nothing follows from, are no part of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.observe.hooks.reading import rows

STEPS = 6
LATE = (2, 4)
"""Steps in which something is done that trains nothing."""


class Loop:
    """A training that looks at its model, or skips batches, in one of several ways."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(self, inputs: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = functional.cross_entropy(self.model(inputs), labels)
        return loss

    def step(self, inputs: Tensor, labels: Tensor, *, micro_batches: int = 1) -> None:
        for own, wanted in zip(inputs.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            (self.loss(own, wanted) / micro_batches).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def batch(number: int, *, tokens: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    drawn = torch.randint(0, 40, (8, 6), generator=generator)
    inputs = drawn if tokens else torch.randn(8, 6, generator=generator)
    return inputs, torch.randint(0, 3, (8,), generator=generator)


def build(*, tokens: bool = False) -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Embedding(40, 6), nn.Flatten()] if tokens else []
    return nn.Sequential(*first, nn.Linear(36 if tokens else 6, 20), nn.GELU(), nn.Linear(20, 3))


Extra = Callable[[Loop, Tensor, Tensor], None]


def nothing(loop: Loop, inputs: Tensor, labels: Tensor) -> None:
    pass


def saliency(loop: Loop, inputs: Tensor, _: Tensor) -> None:
    shown = inputs.clone().requires_grad_(inputs.is_floating_point())
    loop.model(shown).amax(1).sum().backward()
    loop.model.zero_grad()


def adversary(loop: Loop, inputs: Tensor, labels: Tensor) -> None:
    loop.loss(inputs + 0.1 if inputs.is_floating_point() else (inputs + 1) % 40, labels).backward()
    loop.optimizer.zero_grad(set_to_none=False)


def skipped_after_backward(loop: Loop, inputs: Tensor, _: Tensor) -> None:
    other, wanted = batch(99, tokens=not inputs.is_floating_point())
    loop.loss(other, wanted).backward()
    nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    for parameter in loop.model.parameters():
        parameter.grad = None


def skipped_before_backward(loop: Loop, inputs: Tensor, _: Tensor) -> None:
    other, wanted = batch(99, tokens=not inputs.is_floating_point())
    loop.loss(other, wanted)


def skipped_micro_batches(loop: Loop, inputs: Tensor, _: Tensor) -> None:
    for other in inputs.flip(0).split(2):
        loop.model(other).square().sum().backward()
    loop.optimizer.zero_grad()


EXTRAS = [saliency, adversary, skipped_after_backward, skipped_before_backward, skipped_micro_batches]


def train(
    path: Path, extra: Extra = nothing, *, tokens: bool = False, micro_batches: int = 1, **settings: Any
) -> tuple[Path, list[Tensor]]:
    model = build(tokens=tokens)
    loop = Loop(model)
    with traindiff.record(path, model, loop.optimizer, **settings):
        for number in range(STEPS):
            inputs, labels = batch(number, tokens=tokens)
            if number in LATE:
                extra(loop, inputs, labels)
            loop.step(inputs, labels, micro_batches=micro_batches)
    return path, list(model.parameters())


def cleared(path: Path) -> list[tuple[int, int]]:
    """Step, and the last micro-step whose gradients were cleared."""
    return [(seen.step, int(one["sum"])) for seen, one in rows(path, phase="grad", stage="cleared")]


@pytest.mark.parametrize("tokens", [False, True], ids=["numbers", "tokens"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_run_that_looks_or_skips_more_is_the_same_training(
    tmp_path: Path, extra: Extra, micro_batches: int, tokens: bool
) -> None:
    plain, parameters = train(tmp_path / "plain", tokens=tokens)
    further, others = train(tmp_path / "further", extra, tokens=tokens, micro_batches=micro_batches)
    if micro_batches == 1:
        assert all(map(torch.equal, parameters, others))

    for pair in ((plain, further), (further, plain)):
        comparison = traindiff.compare(*pair)

        assert comparison.verdict in ("identical", "equivalent"), str(comparison)
        assert not comparison.findings
        assert not comparison.representation
        assert "in step 2 and 1 more step, passes from which nothing follows were left out" in str(comparison)
    check = traindiff.check(further)
    assert check.verdict == "healthy", str(check)
    assert not check.warnings, str(check)


@pytest.mark.parametrize("extra", EXTRAS)
def test_two_runs_that_do_the_same_are_compared_whole(tmp_path: Path, extra: Extra) -> None:
    comparison = traindiff.compare(*(train(tmp_path / name, extra)[0] for name in ("one", "other")))

    assert comparison.verdict == "identical", str(comparison)
    assert "left out" not in str(comparison)


def test_another_batch_is_found_behind_a_pass_that_was_left_out(tmp_path: Path) -> None:
    def looks_and_scales(loop: Loop, inputs: Tensor, labels: Tensor) -> None:
        saliency(loop, inputs, labels)
        inputs.mul_(1.25)

    plain, further = (train(tmp_path / name, one)[0] for name, one in (("plain", nothing), ("other", looks_and_scales)))
    comparison = traindiff.compare(plain, further)

    assert comparison.verdict == "misaligned", str(comparison)
    first = comparison.findings[0]
    assert (first.step, first.phase, first.path) == (2, "batch", "")


def test_a_fault_is_found_behind_a_pass_that_was_left_out(tmp_path: Path) -> None:
    def looks_and_breaks(loop: Loop, inputs: Tensor, labels: Tensor) -> None:
        saliency(loop, inputs, labels)
        loop.model.get_submodule("2").register_forward_pre_hook(lambda _, given: given[0] * 1.01)

    plain, further = (train(tmp_path / name, one)[0] for name, one in (("plain", nothing), ("other", looks_and_breaks)))
    comparison = traindiff.compare(plain, further)

    assert comparison.verdict == "diverged", str(comparison)
    first = comparison.findings[0]
    assert (first.step, first.phase, first.path) == (2, "forward", "2")


@pytest.mark.parametrize(("zero", "marks"), [("all", 3), ("second", 1), ("none", 0)])
def test_clearing_inside_the_loop_over_micro_batches_is_named(tmp_path: Path, zero: str, marks: int) -> None:
    def run(name: str, cleared_at: Callable[[int, int], bool]) -> Path:
        model = build()
        loop = Loop(model)
        with traindiff.record(tmp_path / name, model, loop.optimizer):
            for number in range(STEPS):
                inputs, labels = batch(number)
                for micro, (own, wanted) in enumerate(zip(inputs.chunk(4), labels.chunk(4), strict=True)):
                    loss = loop.loss(own, wanted) / 4
                    if cleared_at(number, micro):
                        loop.optimizer.zero_grad()
                    loss.backward()
                loop.optimizer.step()
                loop.optimizer.zero_grad()
        return tmp_path / name

    wrong = run(
        "wrong", lambda step, micro: step >= 2 and micro > 0 and (zero == "all" or (zero, micro) == ("second", 2))
    )
    comparison = traindiff.compare(run("right", lambda *_: False), wrong)

    assert len(cleared(wrong)) == marks * (STEPS - 2)
    if zero == "none":
        assert comparison.verdict == "identical"
        return
    first = comparison.findings[0]
    assert (first.step, first.phase) == (2, "grad")
    lost = "micro-steps 0, 1 and 2" if zero == "all" else "micro-steps 0 and 1"
    assert f"In the candidate, the gradients of {lost} were cleared before the step read them" in first.message
    note = f"In 4 of 6 steps, first in step 2, the gradients of {lost} of 4 were cleared before a step read them."
    assert note in str(traindiff.check(wrong))


def test_a_gradient_that_another_optimizer_steps_with_is_not_cleared(tmp_path: Path) -> None:
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    models = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (critic, generator)]
    with traindiff.record(tmp_path / "run", models, optimizers):
        for number in range(4):
            optimizers[0].zero_grad()  # also what the generator's pass left
            made = generator(torch.randn(8, 4))
            (critic(made.detach()).mean() - critic(batch(number)[0]).mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            critic(made).mean().neg().backward()
            optimizers[1].step()

    assert cleared(tmp_path / "run") == []
    assert traindiff.check(tmp_path / "run").verdict == "healthy"


@pytest.mark.parametrize("closure", [torch.optim.LBFGS, None], ids=["LBFGS", "SAM"])
def test_evaluations_of_the_loss_at_other_parameters_are_not_cleared(tmp_path: Path, closure: Any) -> None:
    model = build()
    with traindiff.record(
        tmp_path / "run", model, optimizer := (closure or torch.optim.SGD)(model.parameters(), lr=0.1)
    ):
        for number in range(4):
            inputs, labels = batch(number)

            def evaluate(inputs: Tensor = inputs, labels: Tensor = labels) -> Tensor:
                optimizer.zero_grad()
                loss: Tensor = functional.cross_entropy(model(inputs), labels)
                loss.backward()
                return loss

            if closure:
                optimizer.step(evaluate)
                continue
            evaluate()
            with torch.no_grad():
                moved = [parameter.grad * 0.05 for parameter in model.parameters() if parameter.grad is not None]
                torch._foreach_add_(list(model.parameters()), moved)
            evaluate()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), moved)
            optimizer.step()

    assert cleared(tmp_path / "run") == []
