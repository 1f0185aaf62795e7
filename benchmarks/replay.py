"""What a replayed step of an optimizer costs beside one that is recorded without it: `python -m benchmarks.replay`.

The GPT of `benchmarks/gpt.py`, by AdamW, and by Muon for the matrices of its blocks and AdamW for the rest. Steps that
are replayed and steps that are not take turns; CPU time of the process, the median of the ratios.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpt import BATCH, CONTEXT, GPT, VOCABULARY
from torch.nn import functional

import traindiff
from traindiff.observe.torch.hooks.optimizer_replay import EVERY, FIRST, OptimizerReplayTap


def optimizers(model: GPT, name: str) -> dict[str, torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices of blocks, and AdamW for the rest."""
    matrices = {one for one in model.h.parameters() if one.dim() == 2} if name == "Muon" else set()
    found: dict[str, torch.optim.Optimizer] = {
        "adamw": torch.optim.AdamW([one for one in model.parameters() if one not in matrices], lr=1e-4)
    }
    if matrices:
        found["muon"] = torch.optim.Muon([one for one in model.parameters() if one in matrices], lr=1e-3)
    return found


def measured(name: str, device: str, pairs: int, dtype: torch.dtype) -> dict[str, float]:
    """Seconds of a step without a replay, and of one with it, relative to that."""
    torch.manual_seed(0)
    model = GPT(12).to(device, dtype)
    held = optimizers(model, name)
    generator = torch.Generator().manual_seed(1)
    is_due, seconds = False, ([], [])  # type: ignore[var-annotated]
    clock = time.process_time if device == "cpu" else time.perf_counter

    def step() -> float:
        tokens = torch.randint(VOCABULARY, (BATCH, CONTEXT + 1), generator=generator).to(device)
        begin = clock()
        functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
        for one in held.values():
            one.step()
            one.zero_grad()
        if device != "cpu":
            torch.cuda.synchronize()
        return clock() - begin

    def due(tap: Any) -> bool:
        return is_due and bool(tap._sink.progress.observing)

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.object(OptimizerReplayTap, "_is_due", due),
        traindiff.record(Path(folder) / "run", model, held, observe="replay"),
    ):
        for number in range(2 * pairs + 4):
            is_due = number % 2 == 1
            taken = step()
            if number >= 4:  # the first ones allocate, and compile
                seconds[is_due].append(taken)
    ratio = median(one / other for other, one in zip(*seconds, strict=True))
    over_100 = 1.0 + (ratio - 1.0) * (FIRST + (100 - FIRST) // EVERY) / 100.0
    return {"step": median(seconds[0]), "replayed": ratio, "over_100": over_100}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--optimizer", choices=("AdamW", "Muon"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    given = parser.parse_args()
    for name in [given.optimizer] if given.optimizer else ["AdamW", "Muon"]:
        for dtype in [given.dtype] if given.dtype else ["float32", "bfloat16"]:
            found = measured(name, given.device, given.pairs, getattr(torch, dtype))
            print(name, dtype, {key: f"{value:.4g}" for key, value in found.items()})


if __name__ == "__main__":
    main()
