"""What one use of a parameter contributes, on a GPU; see `traindiff.core.kernels.contribution`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from traindiff.core.kernels.contribution import DRIFT, SHIFT, SHORT, SHORTEST_EXACT, STUCK, Rounding
from traindiff.core.kernels.gpu.enqueue import doubles, enqueue, numbers_on
from traindiff.core.witness import PROBES, SIZE

_PROBES = tl.constexpr(PROBES)
_SHORT, _STUCK, _DRIFT, _SHIFT = (tl.constexpr(one) for one in (SHORT, STUCK, DRIFT, SHIFT))
_SHORTEST_EXACT = tl.constexpr(SHORTEST_EXACT)
_TINY = tl.constexpr(torch.finfo(torch.float64).tiny)


def contribution(
    totals: torch.Tensor, rows: int | torch.Tensor, shift: float | torch.Tensor, by: Rounding
) -> torch.Tensor:
    """See `traindiff.core.kernels.contribution.contribution`."""
    device = totals.device
    found = torch.empty(SIZE, dtype=torch.float64, device=device)
    about = [_on_device(one, device) for one in (rows, shift)]
    addresses = [one.data_ptr() for one in (totals, *about, numbers_on(device, *by), found)]
    enqueue(contribution_kernel, device, (1,), addresses, num_warps=1)
    return found


def _on_device(number: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(number, torch.Tensor):
        return number.double()
    return numbers_on(device, float(number))


@triton.jit(do_not_specialize=["totals", "rows", "shift", "by", "found"])
def contribution_kernel(totals: tl.int64, rows: tl.int64, shift: tl.int64, by: tl.int64, found: tl.int64):
    """One program; all arguments are addresses."""
    probe = tl.arange(0, _PROBES)
    sums = tl.load(doubles(totals) + probe)
    squares, changes = tl.load(doubles(totals) + _PROBES), tl.load(doubles(totals) + _PROBES + 1)
    count, moved = tl.load(doubles(rows)), tl.load(doubles(shift))
    rounding = doubles(by)
    of_sums, exact, width = tl.load(rounding), tl.load(rounding + 1), tl.load(rounding + 2)
    of_result, operand = tl.load(rounding + 3), tl.load(rounding + 4)
    smallest, size = tl.load(rounding + 5), tl.load(rounding + 6)
    mean = tl.sum(sums * sums, 0) / _PROBES
    sticks = tl.where(of_sums * count > 1.0, _STUCK, _SHORT)
    share = tl.where(of_sums <= _SHORTEST_EXACT, 1.0, sticks)
    runs = tl.minimum(tl.maximum(2.0 * squares / tl.maximum(changes, _TINY), 1.0), count) - 1.0
    growth = of_sums * of_sums * count * (share + _DRIFT * _DRIFT * runs)
    shifted = _SHIFT * of_sums
    out = doubles(found)
    tl.store(out + probe, sums)
    tl.store(out + _PROBES, growth * mean)
    tl.store(out + _PROBES + 1, operand * operand * squares / _PROBES)
    tl.store(out + _PROBES + 2, of_result * of_result * mean + smallest * smallest * size)
    tl.store(
        out + _PROBES + 3,
        (growth + exact * exact * width) * (squares / _PROBES) + shifted * shifted * count * moved,
    )
