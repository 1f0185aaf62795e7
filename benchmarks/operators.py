"""What recording operators, and checking products, costs: `python benchmarks/operators.py`.

Prints a table for benchmarks/RESULTS.md. Each row holds a training that is recorded against the same one that is not
observed, in one process, in turns, and gives the median of the rounds' ratios of CPU time, with quartiles.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

import torch
from gpt import Training
from machine import machine

import traindiff
from traindiff.core.observation import OPERATOR_STAGES, PRODUCT_STAGES
from traindiff.run.doctor.timing import interleaved
from traindiff.storage import open_recording


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table."""

    name: str
    settings: dict[str, Any]


NEVER = "1000000"
"""A step to which no training comes here: what is measured is what the tap costs between recorded steps."""

_PRODUCTS = {"observe": "products", "steps": None}

ROWS = [
    Row(name="nothing (how far ratios of equal work scatter)", settings={}),
    Row(name="attached, in steps that are not recorded", settings={"steps": NEVER}),
    Row(name="... with the operators of one block chosen", settings={"steps": NEVER, "operators": "h.3"}),
    Row(name="... with those of the whole model", settings={"steps": NEVER, "operators": "*"}),
    Row(name="every step recorded, no operators", settings={"steps": None}),
    Row(name="... with the operators of one block", settings={"steps": None, "operators": "h.3"}),
    Row(name="... with those of the whole model", settings={"steps": None, "operators": "*"}),
    Row(name="attached to check products, in steps that are not recorded", settings=_PRODUCTS | {"steps": NEVER}),
    Row(name="every product of the step checked, and nothing else recorded", settings=_PRODUCTS),
]


def run(row: Row, directory: Path, *, rounds: int) -> str:
    """The row of the table."""
    plain, watched = Training(), Training()
    path = directory / "run"
    shutil.rmtree(path, ignore_errors=True)
    if not row.settings:
        ratio = interleaved(plain.step, watched.step, rounds=rounds, clock=process_time)
        return f"| {row.name} | **{ratio.median:.3f}** | {ratio.low:.3f} - {ratio.high:.3f} | | |"
    with traindiff.record(path, watched.model, watched.optimizer, strict=True, **row.settings):
        for one in (plain, watched):
            one.step()
        ratio = interleaved(plain.step, watched.step, rounds=rounds, clock=process_time)
    steps = list(open_recording(str(path)).steps(0))
    seen = sum(one.stage in OPERATOR_STAGES | PRODUCT_STAGES for one in steps[-1].observations) if steps else 0
    size = sum(file.stat().st_size for file in path.rglob("*.arrows")) / len(steps) if steps else 0
    numbers = f"{seen:,} | {size / 1e6:.1f} MB" if steps else " | "
    return f"| {row.name} | **{ratio.median:.3f}** | {ratio.low:.3f} - {ratio.high:.3f} | {numbers} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="part of the names of the rows to measure")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print("| | step, CPU time / not observed | quartiles | operators' tensors in a step | on disk, a step |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as directory:
        for row in ROWS:
            if asked.only in row.name:
                print(run(row, Path(directory), rounds=asked.rounds), flush=True)


if __name__ == "__main__":
    main()
