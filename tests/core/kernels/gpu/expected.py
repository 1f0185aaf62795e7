"""The reference's summaries, and the GPU kernel's next to them."""

from __future__ import annotations

from typing import Any

import torch

from tests.core.kernels.rounding import assert_equal_up_to_rounding
from traindiff.core.kernels import reference, torch_arrays
from traindiff.core.kernels.gpu.rows import DeviceRows
from traindiff.core.shards import Shard


def expected_summary(tensor: torch.Tensor, shard: Shard) -> Any:
    found = torch_arrays.elements(tensor.cpu())
    return reference.summarize_array(found.values, found.bits, shard, tiny=found.tiny)


def actual_summary(tensor: torch.Tensor, shard: Shard, device: torch.device, *, elements_per_part: int = 8192) -> Any:
    rows = DeviceRows(device, rows=1, partials=4, elements_per_part=elements_per_part)
    slot = rows.add(tensor.to(device), shard)
    return rows.end_step().result()[slot]


def assert_matches_the_reference(
    tensor: torch.Tensor, shard: Shard, device: torch.device, *, elements_per_part: int = 8192
) -> None:
    actual = actual_summary(tensor, shard, device, elements_per_part=elements_per_part)
    assert_equal_up_to_rounding(actual, expected_summary(tensor, shard))
