"""What `run.json` says of the circumstances of a run: versions, machine, flags, source revision."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from traindiff._version import __version__

_VARIABLES = ("CUBLAS_", "CUDA_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH", "NVIDIA_TF32")
_PACKAGES = ("torch", "numpy", "triton", "deepspeed", "transformers", "accelerate", "lightning")


def describe() -> dict[str, Any]:
    """Circumstances that can change a run's numbers, as JSON values. Reads, never computes on a device."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [_text(argument) for argument in sys.argv],
        "versions": _versions(),
        "environment": _environment(),
        "source": _source(),
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "traindiff": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _environment() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "num_threads": torch.get_num_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "variables": {name: _text(value) for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }


def _text(argument: str) -> str:
    """The argument as UTF-8 can hold it: Python passes on bytes that are none as lone surrogates."""
    return os.fsencode(argument).decode(errors="replace")


def _source() -> dict[str, Any]:
    """Revision of the git checkout that the run was started in; empty where there is none."""
    git = shutil.which("git")
    if git is None:
        return {}

    def ask(*arguments: str) -> str:
        result = subprocess.run(
            [git, *arguments], capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL
        )
        return result.stdout.strip()

    try:
        return {"revision": ask("rev-parse", "HEAD"), "modified": bool(ask("status", "--porcelain", "-uno"))}
    except (OSError, subprocess.SubprocessError):
        return {}
