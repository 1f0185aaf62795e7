"""Trainings whose optimizers step at different rates, recorded in other steps on each side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

import traindiff

STEPS = 16


class Adversaries(nn.Module):
    """A generator, and a critic of what it generates."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.critic(self.generator(x))
        return result


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What a run does wrong; nothing by default."""

    rate: float = 1.0
    scaled: float = 1.0
    misses: int = -1


NONE = Fault()
Loop = Callable[[Adversaries, dict[str, Optimizer], Fault], None]


def step_of(optimizer: Optimizer, iteration: int, fault: Fault) -> None:
    """A step of the optimizer whose faults are tried."""
    if iteration > STEPS // 2:
        for group in optimizer.param_groups:
            for parameter in group["params"] if fault.scaled != 1.0 else ():
                parameter.grad.mul_(fault.scaled)
    if iteration != fault.misses:
        optimizer.step()


def batch(iteration: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(iteration))


def critic_steps_more(model: Adversaries, optimizers: dict[str, Optimizer], fault: Fault) -> None:
    """Three steps of the critic for each of the generator."""
    generator, critic = optimizers["generator"], optimizers["critic"]
    for iteration in range(STEPS):
        critic.zero_grad()
        model.critic(model.generator(batch(iteration)).detach()).square().mean().backward()
        critic.step()
        if iteration % 3 == 2:
            generator.zero_grad()
            (-model(batch(100 + iteration)).mean()).backward()
            step_of(generator, iteration, fault)


def every_second(model: Adversaries, optimizers: dict[str, Optimizer], fault: Fault) -> None:
    """One optimizer accumulates two gradients."""
    generator, critic = optimizers["generator"], optimizers["critic"]
    for iteration in range(STEPS):
        model(batch(iteration)).square().mean().backward()
        critic.step()
        critic.zero_grad()
        if iteration % 2:
            step_of(generator, iteration, fault)
            generator.zero_grad()


def in_turn(model: Adversaries, optimizers: dict[str, Optimizer], fault: Fault) -> None:
    """Four iterations train the critic, the next four the generator."""
    for iteration in range(STEPS):
        model.zero_grad()
        model(batch(iteration)).square().mean().backward()
        if iteration // 4 % 2:
            step_of(optimizers["generator"], iteration, fault)
        else:
            optimizers["critic"].step()


LOOPS = {one.__name__: one for one in (critic_steps_more, every_second, in_turn)}


def recorded(
    path: Path, loop: Loop, *, every: int, first: str = "critic", also: bool = False, fault: Fault = NONE
) -> Path:
    """A training; `first` is the optimizer whose steps are chosen. With `also`, the generator's has all parameters."""
    torch.manual_seed(0)
    model = Adversaries()
    optimizers: dict[str, Optimizer] = {
        "critic": SGD(model.critic.parameters(), lr=0.05),
        "generator": Adam((model if also else model.generator).parameters(), lr=0.01 * fault.rate),
    }
    given = {name: optimizers[name] for name in sorted(optimizers, key=lambda name: name != first)}
    with traindiff.record(path, model, optimizer=given, every=every):
        loop(model, optimizers, fault)
    return path


@pytest.mark.parametrize("also", [False, True])
@pytest.mark.parametrize("first", ["critic", "generator"])
@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("loop", LOOPS)
def test_runs_that_recorded_other_steps_are_identical(
    loop: str, every: int, first: str, also: bool, tmp_path: Path
) -> None:
    whole = recorded(tmp_path / "whole", LOOPS[loop], every=1, first=first, also=also)
    part = recorded(tmp_path / "part", LOOPS[loop], every=every, first=first, also=also)

    for runs in ((whole, part), (part, whole)):
        found = traindiff.compare(*runs)
        assert (found.verdict, found.findings) == ("identical", ()), str(found)
        assert [note.partition(":")[0] for note in found.notes] == ["Not compared"] * also
    assert "(0 to " in str(found)


@pytest.mark.parametrize("fault", [Fault(rate=3.0), Fault(scaled=1.05), Fault(misses=5)])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_fault_of_the_optimizer_that_steps_less_often_is_found(every: int, fault: Fault, tmp_path: Path) -> None:
    baseline = recorded(tmp_path / "b", critic_steps_more, every=1)
    found = traindiff.compare(baseline, recorded(tmp_path / "c", critic_steps_more, every=every, fault=fault))

    # Of every second step, none is recorded in which both runs show the rate of the generator.
    shows_rate = fault.rate != 1.0 and every != 2
    assert found.verdict == ("misaligned" if shows_rate else "diverged"), str(found)
    assert (found.findings[0].kind == "hyper-parameter") == shows_rate
    assert not any(one.kind in ("missing", "extra") for one in found.findings)


def test_a_run_that_ended_early_is_still_told(tmp_path: Path) -> None:
    """Both optimizers of the candidate stop after half of the steps."""

    def half(model: Adversaries, optimizers: dict[str, Optimizer], fault: Fault) -> None:
        for iteration in range(STEPS // 2):
            model(batch(iteration)).square().mean().backward()
            for one in optimizers.values():
                step_of(one, iteration, fault)
                one.zero_grad()

    def whole(model: Adversaries, optimizers: dict[str, Optimizer], fault: Fault) -> None:
        half(model, optimizers, fault)
        half(model, optimizers, fault)

    found = traindiff.compare(recorded(tmp_path / "b", whole, every=1), recorded(tmp_path / "c", half, every=2))
    assert found.verdict == "incomplete"
    assert any(note.startswith(f"The candidate ends after step {STEPS // 2 - 1}; ") for note in found.notes), (
        found.notes
    )
