"""Which tensors the kernel reads, and where their elements are."""

from __future__ import annotations

import torch

from traindiff.errors import UnsupportedTensorError
from traindiff.kernels.gpu.dtypes import DTYPES
from traindiff.kernels.gpu.launch import INTERPRETED
from traindiff.kernels.gpu.plan import Planned, plan
from traindiff.shards import Shard


def reads(tensor: torch.Tensor) -> bool:
    """Whether the kernel can read this tensor: a plain one on a GPU, of one of `dtypes.DTYPES`.

    In Triton's interpreter: on the CPU. Complex tensors, and lazily negated ones, are read after
    `torch_arrays.as_real`.
    """
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    home = "cpu" if INTERPRETED else "cuda"
    return plain and tensor.device.type == home and tensor.dtype in DTYPES and not tensor.is_neg()


def in_order(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    """The tensor with its elements in row-major order, in the shard's shape. Copies a strided one."""
    tensor = tensor.contiguous()
    return tensor if tensor.shape == shard.shape else tensor.reshape(-1)  # a flat range


def address(tensor: torch.Tensor) -> int:
    """Where the tensor's first element is.

    Raises:
        UnsupportedTensorError: Its elements cannot be read, as inside a transform of `torch.func`.
    """
    try:
        return tensor.data_ptr()
    except RuntimeError as error:
        raise UnsupportedTensorError(f"its elements cannot be read: {error}") from error


def pieces(tensor: torch.Tensor, shard: Shard, elements_per_part: int) -> tuple[Planned, ...]:
    """The pieces of a tensor that `in_order` gave."""
    return plan(shard, tensor.stride(), elements_per_part)
