"""What comparing costs while two engines are stepped: `python benchmarks/lockstep.py`. Needs deepspeed.

On each of two ranks there are two pairs of DistributedDataParallel and an engine of DeepSpeed's. One pair is only
stepped, the other one by `traindiff.Lockstep`; they take turns, and ranks wait for each other after each turn. Rank 0
compares while the others wait, so its CPU time is what the elapsed time grows by, on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import io
import warnings
from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch
from gpt import CONTEXT, GPT
from machine import machine
from tests.on_ranks import run_on_ranks
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff
from traindiff.run.doctor.timing import interleaved

LAYERS, WIDTH, VOCABULARY = 4, 256, 3_200

TOLERANCES = {"param_tol": 1e-5, "loss_tol": 1e-5, "grad_tol": 1e-5}

HOW: dict[str, dict[str, Any]] = {
    "parameters, gradients, losses": TOLERANCES,
    "... by measured floors: two copies of the baseline are stepped along": {},
    "... with activations": {**TOLERANCES, "track_activations": True, "activation_tol": 1e-5},
    "... every tenth batch": {**TOLERANCES, "test_every": 10},
}


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def pair(stage: int, batch: int) -> tuple[Any, Any]:
    """DistributedDataParallel with torch's AdamW, and an engine with the same."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        model = GPT(LAYERS, width=WIDTH, vocabulary=VOCABULARY)
        sides.append((model, torch.optim.AdamW(model.parameters(), lr=1e-4)))
    (model, optimizer), (other, other_optimizer) = sides
    engine, *_ = deepspeed.initialize(
        model=other,
        optimizer=other_optimizer,
        config={
            "train_micro_batch_size_per_gpu": batch,
            "gradient_clipping": 0.0,
            "steps_per_print": None,
            "zero_optimization": {"stage": stage},
        },
    )
    return (DistributedDataParallel(model), optimizer), engine


def step_both(sides: tuple[Any, Any], tokens: Tensor) -> None:
    """What a loop does that compares nothing."""
    (model, optimizer), engine = sides
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    engine.backward(loss_of(engine, tokens))
    engine.step()


def ratio(stage: int, batch: int, how: dict[str, Any], rounds: int) -> dict[str, Any]:
    """The ratios on one rank, of elapsed time and of CPU time; ranks wait for each other after each turn."""
    warnings.simplefilter("ignore")
    plain, compared = pair(stage, batch), pair(stage, batch)
    generator = torch.Generator().manual_seed(1 + distributed.get_rank())
    stepper = traindiff.Lockstep(*compared, loss=loss_of, file=io.StringIO(), **how)

    def turn(train: Callable[[Tensor], object]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(how.get("test_every", 1)):
                train(torch.randint(VOCABULARY, (batch, CONTEXT + 1), generator=generator))
            distributed.barrier()

        return run

    turns = turn(lambda tokens: step_both(plain, tokens)), turn(stepper.step)
    for one in turns:
        one()
    found = {
        "elapsed": asdict(interleaved(*turns, rounds=rounds, clock=perf_counter)),
        "cpu": asdict(interleaved(*turns, rounds=rounds)),
    }
    comparison = stepper.finish()
    assert comparison.exit_code == 0, str(comparison)
    return found


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=4, help="sequences of 128 tokens on each rank")
    parser.add_argument("--only", type=int, help="number of the only row to measure")
    options = parser.parse_args()
    num = sum(one.numel() for one in GPT(LAYERS, width=WIDTH, vocabulary=VOCABULARY).parameters())
    print(f"{machine()}; {num:,} parameters, {options.batch} x {CONTEXT} tokens on each of 2 ranks, gloo")
    print("| what is compared | ZeRO stage | CPU time of rank 0 | quartiles | elapsed | quartiles | both, CPU time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for number, (name, how) in enumerate(HOW.items()):
        if options.only not in (None, number):
            continue
        for stage in (1, 3):
            found, _ = run_on_ranks(ratio, 2, stage, options.batch, how, options.rounds, timeout_seconds=900)
            cells = [
                f"**{one['median']:.3f}** | {one['low']:.3f} - {one['high']:.3f}"
                for one in (found["cpu"], found["elapsed"])
            ]
            seconds = found["cpu"]["baseline_seconds"] / how.get("test_every", 1)
            print(f"| {name} | {stage} | {' | '.join(cells)} | {seconds:.2f} s |", flush=True)


if __name__ == "__main__":
    main()
