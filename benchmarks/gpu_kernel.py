"""What the GPU kernel costs: GB/s by dtype and shape, and the host's time per launch. A part of benchmarks/gpu.py.

Each figure is the best of several repetitions, measured with CUDA events over enough calls to fill a
step: what is enqueued is what a step enqueues, merging and copy to the host included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from traindiff.core.shards import Shard

if TYPE_CHECKING:
    from traindiff.core.kernels.gpu.rows import DeviceRows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = ((4096, 4096), (8, 2048, 4096), (50257, 768), (64, 1024), (1 << 26,), (4096,))
REPETITIONS = 5
GIGABYTE = 1e9


def table(device: torch.device) -> list[str]:
    """Lines of the table of kernels, printed as they are measured."""
    from traindiff.core.kernels.gpu.rows import DeviceRows

    rows = DeviceRows(device)
    lines = ["| kernel | shape | GB/s | microseconds |", "| --- | --- | --- | --- |"]
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = torch.randn(shape, device=device).to(dtype)
            shard = Shard.whole(shape)
            calls = max(1, min(200, (1 << 28) // tensor.numel()))
            seconds = device_seconds(lambda: repeat(rows, tensor, shard, calls)) / calls  # noqa: B023
            speed = tensor.numel() * tensor.element_size() / seconds / GIGABYTE
            lines.append(f"| {str(dtype).removeprefix('torch.')} | {shape} | {speed:.0f} | {seconds * 1e6:.1f} |")
            print(lines[-1], flush=True)
    small = [torch.randn(100, device=device) for _ in range(500)]
    shards = [Shard.whole((100,))] * len(small)
    alone = host_seconds(lambda: [rows.add(tensor, shard) for tensor, shard in zip(small, shards, strict=True)], rows)
    together = host_seconds(lambda: rows.add_many(small, shards), rows)
    lines += [
        "",
        f"Host, one launch per tensor: {alone / len(small) * 1e6:.1f} us per tensor; one launch for 500 tensors: "
        f"{together / len(small) * 1e6:.1f} us per tensor.",
    ]
    print(lines[-1])
    return lines


def repeat(rows: DeviceRows, tensor: torch.Tensor, shard: Shard, calls: int) -> None:
    """A step of `calls` observations of one tensor."""
    for _ in range(calls):
        rows.add(tensor, shard)
    rows.end_step()


def device_seconds(work: Callable[[], object]) -> float:
    """Seconds of the device for `work`, the least of several."""
    work()
    least = float("inf")
    for _ in range(REPETITIONS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        least = min(least, begin.elapsed_time(end) / 1e3)
    return least


def host_seconds(work: Callable[[], object], rows: DeviceRows) -> float:
    """Seconds of the host until `work` returns, the least of several."""
    least = float("inf")
    for _ in range(REPETITIONS + 1):  # the first compiles
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
        rows.end_step()
    return least
