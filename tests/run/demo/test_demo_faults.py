from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

import traindiff
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.run.demo.faults import DEFAULT, FAULTS, Fault
from traindiff.run.demo.loop import DemoSettings, StepNumbers, TrainingLoop

MICRO_BATCHES = 3
LAST_STEP = 3

every_fault = pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)

Site = tuple[int, str, str, str, str]
Seen = dict[tuple[Site, int, int], tuple[int, str]]


def test_there_are_many_faults_and_each_is_described() -> None:
    assert len(FAULTS) >= 10
    assert DEFAULT in FAULTS
    for name, fault in FAULTS.items():
        assert fault.name == name
        assert fault.message[0].isupper()
        assert fault.message.endswith(".") or ". " not in fault.message


@every_fault
def test_a_fault_changes_the_training_and_is_taken_back(fault: Fault, tiny: DemoSettings) -> None:
    healthy = new_loop(tiny)
    expected = run(healthy)

    loop = new_loop(tiny)
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    with fault.inject(loop):
        run(loop)
    assert not same(weights(loop), weights(healthy))

    # The same loop, from the same weights again: nothing of the fault is left.
    for parameter, value in zip(loop.model.parameters(), before, strict=True):
        parameter.data.copy_(value)
        parameter.grad = None
    loop.optimizer.state.clear()
    assert run(loop) == expected
    assert same(weights(loop), weights(healthy))


@every_fault
def test_a_fault_is_taken_back_when_the_training_fails(fault: Fault, tiny: DemoSettings) -> None:
    loop = new_loop(tiny)
    with pytest.raises(KeyboardInterrupt), fault.inject(loop):
        raise KeyboardInterrupt
    assert run(loop) == run(new_loop(tiny))


@pytest.fixture(scope="module")
def healthy_run(tiny: DemoSettings, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return record(tiny, tmp_path_factory.mktemp("healthy"), fault=None, steps=LAST_STEP + 1)


@every_fault
def test_a_fault_first_shows_where_it_says(fault: Fault, tiny: DemoSettings, healthy_run: Seen, tmp_path: Path) -> None:
    expected = fault.first_sight
    faulty_run = record(tiny, tmp_path / "faulty", fault=fault, steps=expected.step + 1)
    # Both runs add up in the same order, so before the fault every bit is the same.
    first = next(key for key, value in healthy_run.items() if faulty_run.get(key) != value)
    assert first[0] == (expected.step, expected.phase, expected.stage, expected.path, expected.slot)
    assert (first not in faulty_run) == expected.missing


def new_loop(settings: DemoSettings) -> TrainingLoop:
    return TrainingLoop(settings, micro_batches=MICRO_BATCHES, seed=0)


def run(loop: TrainingLoop, steps: int = LAST_STEP + 1) -> list[StepNumbers]:
    return [loop.run_step(step) for step in range(steps)]


OBSERVED = [name for name in OBSERVABLE if name not in ("grad.stages", "operators", "products", "witness")]
"""Everything outside of operators, but of gradients only each contribution and what the optimizer sees."""


def weights(loop: TrainingLoop) -> Iterator[Tensor]:
    return (parameter.detach() for parameter in loop.model.parameters())


def same(left: Iterator[Tensor], right: Iterator[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def record(settings: DemoSettings, path: Path, *, fault: Fault | None, steps: int) -> Seen:
    """Fingerprints of everything that was seen, in execution order."""
    loop = new_loop(settings)
    with (
        fault.inject(loop) if fault else nullcontext(),
        traindiff.record(path / "run", loop.model, loop.optimizer, observe=OBSERVED, strict=True),
    ):
        run(loop, steps)
    found: Seen = {}
    for step in traindiff.open_recording(str(path / "run")).steps(0):
        for seen, summary in zip(step.observations, step.summaries, strict=True):
            if seen.stage == "clipped":
                continue  # the norm of all gradients
            site = (seen.step, seen.phase, seen.stage, seen.path, seen.slot)
            found[site, seen.micro_step, seen.call] = (int(summary["fingerprint"]), seen.unobserved)
    return found
