"""Bits that flip while gradients are reduced, on two ranks of gloo; part of `python -m benchmarks.corruption`.

*one copy*: the result of an all-reduce of DistributedDataParallel, as one rank has received it. *all copies*: the same
wrong sum on all ranks, as a flip in one rank's part, or on the way, leaves it. *reduce-scatter*: the part of the sum
that one rank of FSDP2 has received. The bit flips before the backward pass ends, so nothing has read the gradient.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from benchmarks.corruption_flips import OBSERVED, STEPS, VOCABULARY, WIDTH, Flip, batch, flipped
from benchmarks.gpt import GPT
from torch import Tensor, distributed, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff

RANKS = 2
KINDS = ("all-reduce, one copy", "all-reduce, all copies", "reduce-scatter")


def train_all(directory: str, kind: str, count: int, dtype: str) -> list[Any]:
    """Train with `count` seeds; the flip of each as a dictionary, or None."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = [_train(f"{directory}/{seed}", kind, seed, getattr(torch, dtype)) for seed in range(count)]
    return [None if one is None else asdict(one) for one in found]


def _train(path: str, kind: str, seed: int, dtype: torch.dtype) -> Flip | None:
    torch.manual_seed(seed)
    model = GPT(2, width=WIDTH, vocabulary=VOCABULARY).to(dtype)
    generator = torch.Generator().manual_seed(2_000_003 * (seed + 1))
    at, target = (int(torch.randint(number, (), generator=generator)) for number in (STEPS - 2, RANKS))
    names = [name for name, one in model.named_parameters() if one.numel() > 1]
    site = names[int(torch.randint(len(names), (), generator=generator))]
    rank = distributed.get_rank()
    called: nn.Module = model
    if kind == "reduce-scatter":
        called = fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    else:
        called = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = torch.Generator().manual_seed(seed)
    flips: list[Flip] = []

    def flip() -> None:
        gradient: Any = model.get_parameter(site).grad
        local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        if local.count_nonzero():
            whose = None if kind == "all-reduce, all copies" else target
            flips.append(flipped(local, generator, step=at + 1, site=site, rank=whose))

    with traindiff.record(path, called, optimizer, observe=OBSERVED):
        for step in range(STEPS):
            tokens = batch(data).tensor_split(RANKS)[rank]
            logits = called(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            if step == at + 1 and kind != "none" and (kind == "all-reduce, all copies" or rank == target):
                logits.register_hook(lambda _: _at_the_end(flip))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    everyone: list[Any] = [None] * RANKS
    distributed.all_gather_object(everyone, flips)
    return next((one for some in everyone for one in some), None)


def _at_the_end(function: Callable[[], None]) -> None:
    """Call a function in this backward pass, after what engines do at its end."""
    queue: Any = Variable._execution_engine.queue_callback
    queue(lambda: queue(function))
