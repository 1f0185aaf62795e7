"""How fast the kernel reads, against a plain read of the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import process_time

import torch
from torch import Tensor

from traindiff.core.kernels import summarize
from traindiff.core.shards import Shard

ELEMENTS = 1 << 26
ROUNDS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians over rounds in which everything took its turn."""

    dtype: str
    kernel_gbs: float
    sum_gbs: float
    copy_gbs: float
    share: float


def measure(elements: int = ELEMENTS) -> list[Speed]:
    """Kernel, `torch.sum` in float32 and a copy (its reads), in GB/s of CPU time, one thread."""
    plain = torch.randn(elements)
    target = torch.empty_like(plain)
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = plain.to(dtype)
        shard = Shard.whole((elements,))
        size, full = tensor.nbytes / 1e9, plain.nbytes / 1e9
        runs: dict[str, tuple[float, Callable[[], object]]] = {
            "kernel": (size, lambda tensor=tensor, shard=shard: summarize(tensor, shard)),
            "sum": (full, plain.sum),
            "copy": (full, lambda: target.copy_(plain)),
        }
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(ROUNDS + 1):
            for name, (gigabytes, run) in runs.items():
                before = process_time()
                run()
                if number:  # the first round warms up
                    speeds[name].append(gigabytes / (process_time() - before))
        shares = [k / s for k, s in zip(speeds["kernel"], speeds["sum"], strict=True)]
        found.append(
            Speed(
                dtype=str(dtype).removeprefix("torch."),
                kernel_gbs=median(speeds["kernel"]),
                sum_gbs=median(speeds["sum"]),
                copy_gbs=median(speeds["copy"]),
                share=median(shares),
            )
        )
    return found


def of_one_call(tensor: Tensor, *, calls: int = 2000) -> float:
    """Microseconds of one call of the kernel on a small tensor."""
    shard = Shard.whole(tuple(tensor.shape))
    summarize(tensor, shard)
    before = process_time()
    for _ in range(calls):
        summarize(tensor, shard)
    return (process_time() - before) / calls * 1e6
