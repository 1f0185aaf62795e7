"""The machine on which something was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import numpy as np
import torch


def machine() -> str:
    """The processor and what runs on it."""
    name = platform.processor() or "unknown processor"
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        name = lines[0].partition(":")[2].strip() if lines else name
    try:
        import llvmlite.binding as llvm

        name += f" (LLVM: {llvm.get_host_cpu_name()})"
    except ModuleNotFoundError:
        pass
    cores = os.cpu_count()
    return (
        f"{name}, {cores} cores; Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}"
    )
