"""What the witness of gradients costs, beside what `record` observes by default: `python benchmarks/witness.py`.

Three trainings take turns in one process: plain, with the default recording, and with the witness too. The witness
costs what the third takes more than the second, as a part of the plain step of the same round; medians of CPU time, one
thread.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from time import process_time

import torch
from gpt import Training
from machine import machine
from torch import Tensor, nn

import traindiff
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT

WITH = dict.fromkeys((*OBSERVED_BY_DEFAULT, "witness"))
SMALL_LAYERS = 200


class Small(nn.Module):
    """Many layers with little to compute: what the host does for each call shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(SMALL_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        """[8, 16] -> the same."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class SmallTraining:
    """The small model, with SGD."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Small()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> None:
        """One step of the optimizer."""
        self.model(torch.ones(8, 16)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def in_dtype(dtype: torch.dtype) -> Training:
    """The GPT with all its parameters in a dtype."""
    training = Training()
    training.model.to(dtype)
    return training


def in_turns(
    make: Callable[[], Training | SmallTraining], *, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each round's step: plain, recorded by default, and recorded with the witness."""
    trainings = [make() for _ in range(3)]
    seconds: tuple[list[float], list[float], list[float]] = ([], [], [])
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        for number, observe in ((1, None), (2, WITH)):
            training = trainings[number]
            path = Path(directory) / str(number)
            stack.enter_context(
                traindiff.record(path, training.model, training.optimizer, observe=observe, strict=True)
            )
        for number in range(-2, rounds):  # two rounds to warm up
            for turn in range(3):
                one = (turn + number) % 3
                before = process_time()
                trainings[one].step()
                if number >= 0:
                    seconds[one].append(process_time() - before)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds per row")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine())
    print("| training | plain step | default / plain | the witness adds | quartiles | goal |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, dtype, goal in (("float32", torch.float32, 0.04), ("bfloat16", torch.bfloat16, 0.06)):
        plain, default, witnessed = in_turns(lambda dtype=dtype: in_dtype(dtype), rounds=rounds)
        base = median(other / one for one, other in zip(plain, default, strict=True))
        added = [(more - less) / one for one, less, more in zip(plain, default, witnessed, strict=True)]
        low, middle, high = quantiles(added, n=4, method="inclusive")
        print(
            f"| GPT, 42 M parameters, {name} | {median(plain):.2f} s | {base:.3f} | **{middle:.3f}** "
            f"| {low:.3f} - {high:.3f} | <= {goal} |",
            flush=True,
        )
    _, default, witnessed = in_turns(SmallTraining, rounds=3 * rounds)
    each = median(more - less for less, more in zip(default, witnessed, strict=True)) / SMALL_LAYERS * 1e6
    print(f"\n{SMALL_LAYERS} layers of 16 x 16: the witness adds {each:.0f} us for each layer (weight and bias).")


if __name__ == "__main__":
    main()
