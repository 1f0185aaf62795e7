"""What recording costs the host, beside reading tensors: `python benchmarks/host.py`, a part of `make bench`.

Tiny tensors, so that nearly all of the time is the host's. A recorded training and the same one that is not take
turns, in one process and on one thread; CPU time of the process, so the thread that writes counts. Medians of the
rounds' ratios and differences. Prints a table, and puts it into benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import pyarrow as pa
import torch
from machine import machine
from torch import Tensor, nn

import traindiff

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "## The host's part"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table: a model, a batch for it, and how it is recorded."""

    name: str
    model: Callable[[], nn.Module]
    batch: tuple[int, ...]
    goal: str = ""
    rounds: int = 40
    settings: dict[str, Any] = field(default_factory=dict)
    first: int = 6


@dataclass(frozen=True, kw_only=True)
class Found:
    """What was measured, in seconds of CPU time."""

    plain: float
    ratio: float
    more: float
    training_thread: float
    rows: int
    bytes_each: float
    attaching: float


class Block(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, given: int, kept: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(given, kept, 3, stride, 1, bias=False), nn.BatchNorm2d(kept), nn.ReLU(),
            nn.Conv2d(kept, kept, 3, 1, 1, bias=False), nn.BatchNorm2d(kept),
        )  # fmt: skip
        same = stride == 1 and given == kept
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(given, kept, 1, stride, bias=False), nn.BatchNorm2d(kept))
        )
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        """Two convolutions, and what they were given."""
        found: Tensor = self.relu(self.layers(images) + self.shortcut(images))
        return found


def resnet18() -> nn.Module:
    """ResNet-18 for images of 32 x 32, with 10 classes."""
    widths = [64, 64, 64, 128, 128, 256, 256, 512, 512]
    blocks = [Block(given, kept, 1 + (given != kept)) for given, kept in pairwise(widths)]
    stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Scales(nn.Module):
    """Many small parameters that one operator uses."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(count)])

    def forward(self, given: Tensor) -> Tensor:
        """Their sum, times what is given."""
        return torch.stack([*self.scales]).sum(0) * given


def linears(count: int) -> nn.Module:
    """Layers of 8 x 8, one after the other."""
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(count)])


def small() -> nn.Module:
    """A model of 37 sites."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


CASES = (
    Case(name="200 layers of 8 x 8, AdamW: everything", model=lambda: linears(200), batch=(4, 8), goal="<= 1.5 x"),
    *(
        Case(name=f"... {name}", model=lambda: linears(200), batch=(4, 8), goal=goal, settings={"observe": observe})
        for name, observe, goal in (
            ("activations and their gradients", ("forward", "backward"), "<= 12 us"),
            ("parameters and their gradients", ("grad", "param"), "<= 1.5 us"),
            ("optimizer state", ("optimizer",), "<= 1.5 us"),
        )
    ),
    Case(name="3 layers, 37 sites: everything", model=small, batch=(4, 8), goal="<= 0.7 ms", rounds=300, first=50),
    Case(
        name="... a step that is not recorded (every=100)", model=small, batch=(4, 8), goal="<= 0.05 ms", rounds=600,
        settings={"every": 1000}, first=50,
    ),
    Case(name="ResNet-18, 32 images of 32 x 32", model=resnet18, batch=(32, 3, 32, 32), goal="<= 1.20 x", rounds=7,
         first=2),
    Case(name="20,000 parameters of 4 elements", model=lambda: Scales(20_000), batch=(4,), goal="<= 1.5 x", rounds=5,
         first=4),
)  # fmt: skip


def training(case: Case) -> tuple[Callable[[], None], nn.Module, torch.optim.Optimizer]:
    """A function that makes a step, and what it trains."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(case.batch)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


@contextmanager
def recorded(case: Case, path: Path) -> Iterator[tuple[Callable[[], None], float]]:
    """The step of a training that is recorded, and how long attaching took."""
    step, model, optimizer = training(case)
    before = process_time()
    with traindiff.record(path, model, optimizer, strict=True, **case.settings):
        yield step, process_time() - before


def measure(case: Case, directory: Path) -> Found:
    """Let both trainings take turns."""
    path = directory / "run"
    shutil.rmtree(path, ignore_errors=True)
    plain, plains, ratios, more, threads = training(case)[0], [], [], [], []
    with recorded(case, path) as (step, attaching):
        for number in range(case.first + case.rounds):
            begin = process_time()
            plain()
            middle, thread = process_time(), thread_time()
            step()
            end, thread = process_time(), thread_time() - thread
            if number >= case.first:
                plains.append(middle - begin)
                ratios.append((end - middle) / (middle - begin))
                more.append(end - middle - (middle - begin))
                threads.append(thread - (middle - begin))
    data = next(path.glob("rank-00000/*.arrows"))
    with pa.OSFile(str(data)) as file:
        rows = [batch.num_rows for batch in pa.ipc.open_stream(file)]
    return Found(
        plain=statistics.median(plains), ratio=statistics.median(ratios), more=statistics.median(more),
        training_thread=statistics.median(threads), rows=int(statistics.median(rows)),
        bytes_each=data.stat().st_size / max(1, sum(rows)), attaching=attaching,
    )  # fmt: skip


def table(cases: tuple[Case, ...]) -> list[str]:
    """Lines of the table."""
    torch.set_num_threads(1)
    lines = [
        "| model | plain step | recorded / plain | longer by | observations | each | of it on the training's thread "
        "| bytes each | attaching | goal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as directory:
        for case in cases:
            found = measure(case, Path(directory))
            one, thread = found.more / found.rows, found.training_thread / found.rows
            lines.append(
                f"| {case.name} | {1e3 * found.plain:.2f} ms | **{found.ratio:.2f}** | {1e3 * found.more:.2f} ms "
                f"| {found.rows:,} | {1e6 * one:.1f} us | {1e6 * thread:.1f} us | {found.bytes_each:.0f} "
                f"| {found.attaching:.2f} s | {case.goal} |"
            )
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    """Measure, print, and write the table into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this; nothing is written then")
    options = parser.parse_args()
    lines = table(tuple(case for case in CASES if options.only in case.name))
    if options.only:
        return
    head = [
        HEADING, "", f"`python benchmarks/host.py` on {datetime.now(UTC):%Y-%m-%d}; {machine()}.", "", *lines, "",
    ]  # fmt: skip
    text = RESULTS.read_text(encoding="utf-8")
    section = "\n".join(head)
    if HEADING in text:
        text = re.sub(rf"{HEADING}\n.*?\n\n\|.*?\n\n", lambda _: section + "\n", text, count=1, flags=re.DOTALL)
    else:
        text = text.replace("## Watching\n", f"{section}\n## Watching\n", 1)
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
