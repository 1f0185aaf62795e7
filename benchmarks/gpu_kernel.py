"""What the GPU kernel costs: GB/s by dtype and shape, and the host's time per launch.

    python benchmarks/gpu_kernel.py

Each figure is the best of several repetitions, measured with CUDA events over enough calls to fill a
step: what is enqueued is what a step enqueues, merging and copy to the host included.
"""

from __future__ import annotations

import sys
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


def main() -> int:
    """Measure and print; where there is no GPU, say so."""
    if not torch.cuda.is_available():
        print("There is no GPU here, and Triton's interpreter says nothing about speed: nothing was measured.")
        return 0
    from traindiff.core.kernels.gpu.rows import DeviceRows

    device = torch.device("cuda", torch.cuda.current_device())
    print(torch.cuda.get_device_name(device))
    rows = DeviceRows(device)
    print(f"\n{'dtype':<10}{'shape':<20}{'GB/s':>8}{'microseconds':>14}")
    for dtype in DTYPES:
        for shape in SHAPES:
            tensor = torch.randn(shape, device=device).to(dtype)
            shard = Shard.whole(shape)
            calls = max(1, min(200, (1 << 28) // tensor.numel()))
            seconds = device_seconds(lambda: repeat(rows, tensor, shard, calls)) / calls  # noqa: B023
            speed = tensor.numel() * tensor.element_size() / seconds / GIGABYTE
            print(f"{str(dtype).removeprefix('torch.'):<10}{shape!s:<20}{speed:>8.0f}{seconds * 1e6:>14.1f}")

    small = [torch.randn(100, device=device) for _ in range(500)]
    shards = [Shard.whole((100,))] * len(small)
    alone = host_seconds(lambda: [rows.add(tensor, shard) for tensor, shard in zip(small, shards, strict=True)], rows)
    together = host_seconds(lambda: rows.add_many(small, shards), rows)
    print(f"\nhost, one launch per tensor:      {alone / len(small) * 1e6:8.1f} microseconds per tensor")
    print(f"host, one launch for 500 tensors: {together / len(small) * 1e6:8.1f} microseconds per tensor")
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
