"""What recording costs on several ranks: `python benchmarks/overhead.py --ranks 2`.

Each rank has a plain and an observed training under DistributedDataParallel, which take turns; all ranks take the
same turns. CPU time of a rank does not count what it waits for the others.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpt import Training
from tests.on_ranks import run_on_ranks
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import traindiff
from traindiff.run.doctor.timing import interleaved


def rank_ratio(settings: dict[str, Any] | None, directory: str, rounds: int) -> dict[str, Any]:
    """The ratio on one rank."""
    torch.set_num_threads(1)
    plain, observed = Training(), Training()
    for training in (plain, observed):
        if distributed.get_world_size() > 1:
            training.model = DistributedDataParallel(training.model)
            training.call = training.model
    path = Path(directory) / "run"
    if settings is None:
        return _ratio(plain, observed, rounds)
    with traindiff.record(path, observed.model, observed.optimizer, strict=True, **settings):
        return _ratio(plain, observed, rounds)


def _ratio(plain: Training, observed: Training, rounds: int) -> dict[str, Any]:
    for _ in range(2):
        plain.step()
        observed.step()
    return asdict(interleaved(plain.step, observed.step, rounds=rounds))


def on_ranks(name: str, settings: dict[str, Any] | None, *, world_size: int, rounds: int) -> str:
    """A line of the table: the median over ranks, and the largest."""
    with tempfile.TemporaryDirectory() as directory:
        found = run_on_ranks(rank_ratio, world_size, settings, directory, rounds, timeout_seconds=900)
    ratios = sorted(one["median"] for one in found)
    return f"| {name} | {world_size} | **{median(ratios):.3f}** | {ratios[-1]:.3f} |"


HEAD = ["| what is observed | ranks | step time / plain, median of ranks | largest |", "| --- | --- | --- | --- |"]
