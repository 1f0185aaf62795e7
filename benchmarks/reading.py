"""What reading and comparing recordings cost: `python benchmarks/reading.py`, a part of `make bench`.

Two trainings are recorded for each shape, and compared in processes of their own, on one thread. Small tensors: what
counts is the number of observations. CPU time without imports, and peak memory of the comparing process. Medians of
the rounds. Prints a table, and puts it into benchmarks/RESULTS.md.

`--before DIRECTORY` takes turns with the source tree of another version, and shows its times too.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from host import Scales, linears, small
from machine import machine
from torch import nn

import traindiff

RESULTS = Path(__file__).with_name("RESULTS.md")
HEADING = "## Reading and comparing"
SOURCE = Path(__file__).parent.parent / "src"

COMPARE = """
import os, resource, sys, time
begin = time.process_time()
import traindiff
imported = time.process_time()
found = traindiff.{call}(*sys.argv[1:])
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(time.process_time() - imported, imported - begin, peak[0].split()[1], str(getattr(found, "verdict", "")))
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table: a model, and how two trainings of it differ."""

    name: str
    model: Callable[[], nn.Module]
    batch: tuple[int, ...]
    steps: int
    micro_steps: int = 1
    replica: str | None = None
    broken: bool = False
    call: str = "compare"
    goal: str = ""


def deep() -> nn.Module:
    """80 layers of 8 x 8: 970 sites."""
    return linears(80)


CASES = (
    Case(name="80 layers, 970 sites, 40 steps, the same", model=deep, batch=(4, 8), steps=40, goal="0.4 s"),
    Case(name="... one rounded otherwise (a replica)", model=deep, batch=(4, 8), steps=40, replica="ulp:1",
         goal="0.4 s"),
    Case(name="... `check`", model=deep, batch=(4, 8), steps=40, call="check"),
    Case(name="3 layers, 37 sites, 1,000 steps, the same", model=small, batch=(4, 8), steps=1000, goal="1 s"),
    Case(name="... a fault in the middle", model=small, batch=(4, 8), steps=1000, broken=True, goal="1 s"),
    Case(name="3 layers, 20 steps of 200 micro-steps", model=small, batch=(4, 8), steps=20, micro_steps=200),
    Case(name="3 layers, 4 steps of 1,000 micro-steps", model=small, batch=(4, 8), steps=4, micro_steps=1000),
    Case(name="20,000 parameters of 4 elements, 2 steps", model=lambda: Scales(20_000), batch=(4,), steps=2,
         goal="500 MB"),
)  # fmt: skip


def record(case: Case, path: Path, *, candidate: bool) -> int:
    """Record a training; the number of its observations."""
    torch.manual_seed(0)
    model = case.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer, replica=case.replica if candidate else None):
        for step in range(case.steps):
            for _ in range(case.micro_steps):
                (model(torch.randn(case.batch)).square().mean() / case.micro_steps).backward()
            if candidate and case.broken and step == case.steps // 2:
                next(model.parameters()).grad.mul_(1.5)
            optimizer.step()
            optimizer.zero_grad()
    return sum(len(step.observations) for step in traindiff.open_recording(path).steps(0))


def measured(case: Case, paths: list[Path], source: Path) -> tuple[float, float, float, str]:
    """CPU seconds, those of importing, peak memory in MB, and the verdict."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    given = paths[: 1 if case.call == "check" else 2]
    command = [sys.executable, "-c", COMPARE.format(call=case.call), *map(str, given)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    seconds, importing, peak, *word = done.stdout.split()
    return float(seconds), float(importing), int(peak) / 1024, " ".join(word)


def table(cases: tuple[Case, ...], sources: list[Path], rounds: int, keep: Path | None) -> list[str]:
    """Lines of the table."""
    torch.set_num_threads(1)
    lines = [
        "| recordings | observations of both | CPU time before | now | each | peak memory before | now | goal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    with tempfile.TemporaryDirectory() as temporary:
        for number, case in enumerate(cases):
            directory = (keep or Path(temporary)) / re.sub(r"\W+", "-", f"{case.steps}-{case.micro_steps}-{case.name}")
            paths = [directory / "baseline", directory / "candidate"]
            count = sum(record(case, path, candidate=bool(at)) for at, path in enumerate(paths) if not path.exists())
            count = count or sum(len(s.observations) for path in paths for s in traindiff.open_recording(path).steps(0))
            count = count // 2 if case.call == "check" else count
            runs = [[measured(case, paths, source) for source in sources] for _ in range(rounds)]
            seconds = [statistics.median(run[at][0] for run in runs) for at in range(len(sources))]
            peaks = [statistics.median(run[at][2] for run in runs) for at in range(len(sources))]
            before = f"{seconds[0]:.2f} s", f"{peaks[0]:.0f} MB"
            lines.append(
                f"| {case.name} | {count:,} | {before[0] if len(sources) > 1 else ''} | **{seconds[-1]:.2f} s** "
                f"| {1e6 * seconds[-1] / count:.1f} us | {before[1] if len(sources) > 1 else ''} "
                f"| {peaks[-1]:.0f} MB | {case.goal} |"
            )
            print(lines[-1], runs[0][-1][3], number, flush=True)
    return lines


def main() -> None:
    """Measure, print, and write the table into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this; nothing is written then")
    parser.add_argument("--before", type=Path, help="the directory `src` of another version")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="a directory in which recordings stay, and are used again")
    options = parser.parse_args()
    sources = [*([options.before] if options.before else []), SOURCE]
    lines = table(tuple(c for c in CASES if options.only in c.name), sources, options.rounds, options.keep)
    if options.only:
        return
    head = [
        HEADING,
        "",
        f"`python benchmarks/reading.py` on {datetime.now(UTC):%Y-%m-%d}; {machine()}.",
        "",
        *lines,
        "",
    ]
    text = RESULTS.read_text(encoding="utf-8")
    section = "\n".join(head)
    if HEADING in text:
        text = re.sub(rf"{HEADING}\n.*?\n\n\|.*?\n\n", lambda _: section + "\n", text, count=1, flags=re.DOTALL)
    else:
        text = text.rstrip("\n") + f"\n\n{section}"
    RESULTS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
