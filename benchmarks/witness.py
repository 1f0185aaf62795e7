"""What the witness of gradients costs, beside what `record` observes by default: `python benchmarks/witness.py`.

Three trainings take turns in one process: plain, with the default recording, and with the witness too. The witness
costs what the third takes more than the second, as a part of the plain step of the same round; medians of CPU time, one
thread.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import process_time, thread_time
from typing import Any

import torch
from gpt import Training
from machine import machine
from torch import Tensor, nn

import traindiff
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT
from traindiff.observe.common.faults import Faults

WITH = dict.fromkeys((*OBSERVED_BY_DEFAULT, "witness"))
TAPS = ("witness", "layer_products", "state_marks", "gradient_marks")
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


@contextmanager
def timed() -> Iterator[dict[str, float]]:
    """CPU seconds inside hooks, by the tap that a hook belongs to."""
    seconds: dict[str, float] = defaultdict(float)
    call = Faults.call

    def timed_call(self: Faults, tap: str, *args: Any, **kwargs: Any) -> Any:
        before = thread_time()
        try:
            return call(self, tap, *args, **kwargs)
        finally:
            seconds[tap] += thread_time() - before

    Faults.call = timed_call  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Faults.call = call  # type: ignore[method-assign]


def inside(dtype: torch.dtype, *, rounds: int) -> dict[str, float]:
    """The share of a plain step that is spent inside the hooks of each tap of the witness; medians of rounds."""
    plain, witnessed = in_dtype(dtype), in_dtype(dtype)
    shares: dict[str, list[float]] = {tap: [] for tap in TAPS}
    with (
        tempfile.TemporaryDirectory() as directory,
        traindiff.record(directory, witnessed.model, witnessed.optimizer, observe=("grad", "witness"), strict=True),
        timed() as seconds,
    ):
        for number in range(-2, rounds):
            before = process_time()
            plain.step()
            whole = process_time() - before
            seconds.clear()
            witnessed.step()
            for tap in TAPS if number >= 0 else ():
                shares[tap].append(seconds[tap] / whole)
    return {tap: median(each) for tap, each in shares.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds per row")
    parser.add_argument(
        "--inside", action="store_true", help="only say how much time hooks take: other work harms less"
    )
    given = parser.parse_args()
    rounds = given.rounds
    torch.set_num_threads(1)
    print(machine())
    if given.inside:
        print("| dtype | " + " | ".join(TAPS) + " | sum |")
        print("| --- " * (len(TAPS) + 2) + "|")
        for dtype in (torch.float32, torch.bfloat16):
            shares = inside(dtype, rounds=rounds)
            cells = [*shares.values(), sum(shares.values())]
            print(f"| {str(dtype).removeprefix('torch.')} | " + " | ".join(f"{one:.3f}" for one in cells) + " |")
        return
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
