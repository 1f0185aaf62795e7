"""What compact recordings of many ranks take, and what comparing them costs: `python benchmarks/scale.py`.

Recordings are simulated as in `merge.py`. Each is compacted, in a process of its own that reports its CPU time and peak
memory, and its compact form is compared with that of a run on one rank. Costs of a step are what more steps add.
Needs 2 MB of disk for each rank and step, and removes what it wrote.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import machine
from merge import measure, write

RANKS = (16, 128, 1024)
STEPS_OF_MANY_RANKS = 2
"""The first step also has the parameters as it found them."""

RANKS_OF_LONG_RUNS, STEPS = 16, (2, 12)

_CHILD = """
import json, re, resource, sys
from pathlib import Path
from traindiff.analyse.compact.compacting import compact

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])

before, empty = resource.getrusage(resource.RUSAGE_SELF), peak_bytes()
made = compact(*sys.argv[1:3])
after = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "cpu_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    "peak_bytes": peak_bytes() - empty, "whole": dict(made.whole),
}))
"""


def compacted(source: Path, target: Path) -> dict[str, float]:
    """Compact a recording in a process of its own."""
    command = [sys.executable, "-c", _CHILD, str(source), str(target)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def _stream_bytes(recording: Path) -> int:
    """Size of the merged steps, without what is written once."""
    return (recording / "merged" / "observations.arrows").stat().st_size


def _total_bytes(recording: Path) -> int:
    return sum(file.stat().st_size for file in recording.rglob("*") if file.is_file())


def of_ranks(num_ranks: int, directory: Path) -> str:
    """A row about the size of a step, and what compacting it costs."""
    path, target = directory / "many", directory / "compact"
    write(path, num_ranks=num_ranks, num_steps=STEPS_OF_MANY_RANKS)
    whole = _total_bytes(path)
    made = compacted(path, target)
    shutil.rmtree(path)
    per_step, once = _stream_bytes(target) / STEPS_OF_MANY_RANKS, _total_bytes(target) - _stream_bytes(target)
    shutil.rmtree(target)
    cpu = made["cpu_seconds"] / STEPS_OF_MANY_RANKS
    return (
        f"| {num_ranks} | {whole / STEPS_OF_MANY_RANKS / num_ranks / 1e3:,.0f} kB | {per_step / 1e6:.2f} MB | "
        f"{per_step / num_ranks / 1e3:.2f} kB | {once / num_ranks / 1e3:.1f} kB | {cpu:.1f} s | "
        f"{made['peak_bytes'] / 1e6:,.0f} MB |"
    )


def of_long_runs(directory: Path) -> list[str]:
    """Rows about comparing runs of several lengths, compact and whole."""
    costs: dict[str, list[float]] = {"whole": [], "compact": []}
    for num_steps in STEPS:
        sides = [directory / "one", directory / "many"]
        for side, num_ranks in zip(sides, (1, RANKS_OF_LONG_RUNS), strict=True):
            write(side, num_ranks=num_ranks, num_steps=num_steps)
        costs["whole"].append(float(measure(*sides)["cpu_seconds"]))
        smaller = [directory / f"{side.name}-compact" for side in sides]
        for side, target in zip(sides, smaller, strict=True):
            compacted(side, target)
        costs["compact"].append(float(measure(*smaller)["cpu_seconds"]))
        for one in (*sides, *smaller):
            shutil.rmtree(one)
    added = STEPS[1] - STEPS[0]
    rows = []
    for name, seconds in costs.items():
        shown = ", ".join(f"{one:.2f} s" for one in seconds)
        rows.append(f"| {name} | {shown} | {(seconds[1] - seconds[0]) / added * 1e3:.0f} ms |")
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=RANKS)
    parser.add_argument("--directory", help="where recordings are written for a while; default: the temporary one")
    arguments = parser.parse_args()
    print(f"{machine()}\n")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        print(
            f"| runs on {RANKS_OF_LONG_RUNS} ranks and on 1 | compared, {STEPS[0]} and {STEPS[1]} steps | each step |"
        )
        print("| --- | --- | --- |")
        for row in of_long_runs(Path(name)):
            print(row, flush=True)
        print("\n| ranks | whole, per rank and step | compact, per step | per rank and step | once per rank | "
              "CPU time to compact a step | peak memory |")  # fmt: skip
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for num_ranks in arguments.ranks:
            print(of_ranks(num_ranks, Path(name)), flush=True)


if __name__ == "__main__":
    main()
