"""The circumstances of a run under torch, for `run.json`: versions, machine, flags, source revision."""

from __future__ import annotations

import os
from typing import Any

import torch

from traindiff.core.torch_compat.operators import float32_matmul_precision
from traindiff.observe.common.circumstances import circumstances, variables


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank and the number of ranks: of the process group, or as the launcher has set them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


_VARIABLES = ("CUBLAS_", "CUDA_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "NVIDIA_TF32")
_PACKAGES = ("torch", "numpy", "triton", "deepspeed", "transformers", "accelerate", "lightning")


def describe() -> dict[str, Any]:
    """Circumstances that can change a run's numbers, as JSON values. Reads, never computes on a device."""
    environment = {
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "variables": variables(_VARIABLES),
    }
    return circumstances(packages=_PACKAGES, environment=environment)
