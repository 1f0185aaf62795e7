"""The dtypes that tensors would have in the training as it is, while it is computed in a longer one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
from torch import Tensor

_AUTOCAST_SHORT = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution", "linear", "mkldnn_rnn_layer", "_cudnn_rnn",
        "_thnn_fused_lstm_cell", "prelu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)  # fmt: skip
"""Operators that autocast computes in its dtype. (It leaves float64 alone, so here it does not.)"""

_AUTOCAST_LONG = frozenset(
    {
        "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "exp", "log", "pow", "rsqrt", "sum",
        "prod", "cumsum", "nll_loss_forward", "mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits",
    }
)  # fmt: skip
"""Operators that autocast computes in float32."""


class NominalDtypes:
    """Remembers dtypes by storage: all views of a tensor have one.

    Attributes:
        autocast: The dtype of the autocast region that the training is in, if it is in one.
    """

    def __init__(self) -> None:
        self.autocast: torch.dtype | None = None
        self._by_storage: dict[int, torch.dtype] = {}  # addresses are used again, so it grows no longer than memory

    def of(self, tensor: Tensor) -> torch.dtype:
        """The dtype that this tensor would have."""
        return self._by_storage.get(_address(tensor), tensor.dtype) if _has_storage(tensor) else tensor.dtype

    def note(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """`tensor` would have this dtype."""
        if not _has_storage(tensor):
            return
        if dtype == tensor.dtype:
            self._by_storage.pop(_address(tensor), None)
        else:
            self._by_storage[_address(tensor)] = dtype

    def clear(self) -> None:
        """Forget everything."""
        self._by_storage.clear()

    def of_result(self, name: str, inputs: Iterable[Tensor]) -> torch.dtype | None:
        """What the operator of aten with this name would return for such inputs; None if that does not follow."""
        floating = [tensor for tensor in inputs if tensor.is_floating_point()]
        if not floating:
            return None
        if self.autocast is not None and name in _AUTOCAST_SHORT:
            return self.autocast
        if self.autocast is not None and name in _AUTOCAST_LONG:
            return torch.float32
        decisive = [tensor for tensor in floating if tensor.dim()] or floating
        return reduce(torch.promote_types, map(self.of, decisive))


def current_autocast() -> torch.dtype | None:
    """The dtype of the autocast region that this code is in; not to be asked from inside an operator."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


def _address(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
