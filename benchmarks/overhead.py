"""What recording costs: `make bench`. Prints tables and writes them into benchmarks/RESULTS.md.

What that file says from "What bounds it" on is kept. With the extra `bench` installed, transformers'
DebugUnderflowOverflow is measured in the same run.

Every row holds a training that is observed against the same one that is not, in one process, in turns,
and gives the median of the rounds' ratios, with quartiles: other work on the machine hits both alike.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch
from gpt import Training
from kernel_speed import ELEMENTS, measure, of_one_call
from machine import machine
from ranks import HEAD, on_ranks

import traindiff
from traindiff.run.doctor.timing import Ratio, interleaved

RESULTS = Path(__file__).with_name("RESULTS.md")
FOUR = ("param", "grad", "forward", "backward")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    goal: float | None
    settings: dict[str, Any] | None = None
    layers: int = 12
    compiled: bool = False
    threads: int = 1
    rounds: int = 9
    watch: Callable[[Training], AbstractContextManager[Any]] | None = None

    @property
    def clock(self) -> Callable[[], float]:
        """CPU time at one thread, wall time at several."""
        return process_time if self.threads == 1 else perf_counter

    def attach(self, training: Training, directory: Path) -> AbstractContextManager[Any]:
        """Observe a training as this row says."""
        if self.watch is not None:
            return self.watch(training)
        if self.settings is None:
            return nullcontext()
        path = directory / "run"
        shutil.rmtree(path, ignore_errors=True)
        return traindiff.record(path, training.model, training.optimizer, strict=True, **self.settings)


def watching(training: Training) -> AbstractContextManager[Any]:
    """`traindiff.watch` with everything that it does by default."""
    return traindiff.watch(training.model, training.optimizer)


def debug_underflow_overflow(training: Training) -> AbstractContextManager[Any]:
    """The detector of transformers, which has no way to be removed."""
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(training.model)
    return nullcontext()


ROWS = [
    Row(name="nothing (how far ratios of equal work scatter)", goal=None),
    Row(name="parameters, gradients, activations, their gradients, every step", goal=1.10, settings={"observe": FOUR}),
    Row(name="what `record` observes by default (also optimizer state, batches, losses)", goal=1.15, settings={}),
    Row(name="parameters and gradients", goal=1.03, settings={"observe": ("param", "grad")}),
    Row(name="attached, between recorded steps (every=100)", goal=1.01, settings={"every": 100}),
    Row(
        name="compiled (inductor, 4 layers): the four classes, every step",
        goal=1.15,
        settings={"observe": FOUR},
        layers=4,
        compiled=True,
    ),
    Row(name="2 threads, wall: the four classes, every step", goal=1.20, settings={"observe": FOUR}, threads=2),
    Row(name="`watch`: NaN and infinity, forward, backward, gradients, optimizer", goal=1.08, watch=watching),
]


def run(row: Row, directory: Path, *, rounds: int) -> tuple[Ratio, int]:
    """The ratio, and how many graph breaks there were."""
    torch.set_num_threads(row.threads)
    plain, watched = (Training(layers=row.layers, compiled=row.compiled) for _ in range(2))
    with ExitStack() as stack:
        # Recorded first: attaching makes compiled code be compiled anew.
        stack.enter_context(row.attach(watched, directory))
        for _ in range(3 if row.compiled else 2):
            plain.step()
            watched.step()
        ratio = interleaved(plain.step, watched.step, rounds=rounds, clock=row.clock)
    breaks = 0
    if row.compiled:
        from torch._dynamo.utils import counters

        breaks = sum(counters["graph_break"].values())
        torch.compiler.reset()
    del plain, watched
    gc.collect()
    return ratio, breaks


def verdict(value: float, goal: float | None, *, at_least: bool = False) -> str:
    """Whether a goal is met."""
    if goal is None:
        return ""
    return "met" if (value >= goal if at_least else value <= goal) else "missed"


def table(rows: list[Row], *, rounds: int) -> list[str]:
    """Lines of the table of trainings."""
    lines = [
        "| what is observed | step time / plain | quartiles | plain step | goal | |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as directory:
        for row in rows:
            ratio, breaks = run(row, Path(directory), rounds=rounds)
            name = f"{row.name}, {breaks} graph breaks" if row.compiled else row.name
            goal = f"<= {row.goal:.2f}" if row.goal else "-"
            lines.append(
                f"| {name} | **{ratio.median:.3f}** | {ratio.low:.3f} - {ratio.high:.3f} "
                f"| {ratio.baseline_seconds:.2f} s | {goal} | {verdict(ratio.median, row.goal)} |"
            )
            print(lines[-1], flush=True)
    return lines


def kernel_table() -> list[str]:
    """Lines of the table of kernels."""
    torch.set_num_threads(1)
    lines = [
        f"| kernel, {ELEMENTS:.1e} elements | GB/s | torch.sum float32 | copy (reads) | share of torch.sum | goal | |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for speed in measure():
        goal = 0.50 if speed.dtype == "float32" else 0.35
        lines.append(
            f"| {speed.dtype} | {speed.kernel_gbs:.2f} | {speed.sum_gbs:.2f} | {speed.copy_gbs:.2f} "
            f"| **{speed.share:.0%}** | >= {goal:.0%} | {verdict(speed.share, goal, at_least=True)} |"
        )
        print(lines[-1], flush=True)
    lines += ["", f"One call on 1,000 float32 elements: {of_one_call(torch.randn(1000)):.1f} us."]
    return lines


def main() -> None:
    """Measure, print, and write RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="rounds per row")
    parser.add_argument("--only", default="", help="rows whose name contains this; nothing is written then")
    parser.add_argument("--ranks", type=int, default=0, help="measure on so many ranks, and on one; writes nothing")
    options = parser.parse_args()
    if options.ranks:
        print("\n".join(HEAD), flush=True)
        for row in ROWS[:3]:
            for world_size in (1, options.ranks):
                print(on_ranks(row.name, row.settings, world_size=world_size, rounds=options.rounds), flush=True)
        return
    rows = [row for row in ROWS if options.only in row.name]
    try:
        import transformers
    except ModuleNotFoundError:
        print("transformers is not installed (pip install 'traindiff[bench]'): no row for DebugUnderflowOverflow.")
    else:
        name = f"transformers {transformers.__version__} DebugUnderflowOverflow (detection, forward only)"
        rows.append(Row(name=name, goal=None, watch=debug_underflow_overflow))
    lines = table(rows, rounds=options.rounds)
    if options.only:
        return
    kernels = kernel_table()
    words = RESULTS.read_text(encoding="utf-8").partition("## What bounds it")[2] if RESULTS.exists() else "\n"
    head = [
        "# What recording costs",
        "",
        f"Written by `make bench` on {datetime.now(UTC):%Y-%m-%d}. {machine()}.",
        "",
        "A GPT with 12 layers, width 512, vocabulary 8,000 (42 million parameters), batches of 4 x 128 tokens, AdamW,",
        "float32. Observed and plain training take turns in one process; CPU time at one thread unless said",
        f"otherwise; medians of {options.rounds} rounds' ratios. Statistics, fingerprints, sketch and profiles are in",
        "every row: the kernel computes them together, so there is no cheaper level to list.",
        "",
    ]
    text = "\n".join([*head, *lines, "", *kernels, "", "## What bounds it"]) + words
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
