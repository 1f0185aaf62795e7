"""What extensions of torch are built with, and what a build that was killed left behind."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

_COMPILERS = ("ninja", "cc1plus", "c++", "g++", "clang", "clang++", "nvcc", "cicc")
"""Processes of which one runs as long as an extension is built."""

_STARTING_SECONDS = 30.0
"""How long a build may hold its lock before its compiler is seen, or after it has gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleLock:
    """A lock that nobody will give back.

    Attributes:
        path: Of the file.
        age_seconds: Since it was taken.
    """

    path: Path
    age_seconds: float

    @property
    def age(self) -> str:
        """As messages say it: `3 hours`."""
        for unit, seconds in (("day", 86400), ("hour", 3600), ("minute", 60)):
            if (count := int(self.age_seconds // seconds)) >= 1:
                return f"{count} {unit}{'s' if count > 1 else ''}"
        return f"{self.age_seconds:.0f} seconds"


def extensions_directory() -> Path:
    """Where torch builds extensions: a folder for each, with a file `lock` while it is built."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cuda, hip = torch.version.cuda, torch.version.hip
    accelerator = f"rocm{hip.replace('.', '')}" if hip else f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    return (
        cache / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_{accelerator}"
    )


def is_built(extension: str) -> bool:
    """Whether there is a library of it, so that it is probably not compiled again."""
    return any((extensions_directory() / extension).glob("*.so"))


def stale_lock(extension: str) -> StaleLock | None:
    """The lock of an extension that is not being built: older than a build takes to start, and no compiler runs."""
    path = extensions_directory() / extension / "lock"
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return None
    if age < _STARTING_SECONDS or compiler_runs():
        return None
    return StaleLock(path=path, age_seconds=age)


def compiler_runs(processes: Path = Path("/proc")) -> bool:
    """Whether a compiler is at work on this machine; False where that cannot be seen."""
    for name in processes.glob("[0-9]*/comm"):
        try:
            command = name.read_text().strip()
        except OSError:
            continue  # it has just ended
        if re.sub(r"-[\d.]+$", "", command) in _COMPILERS:
            return True
    return False


def missing_tools() -> list[str]:
    """Of what compiles an extension: what is not found."""
    compiler = os.environ.get("CXX", "c++")
    return [tool for tool in (compiler, "ninja") if shutil.which(tool) is None]


def has_header(name: str) -> bool:
    """Whether a compiler would find a header."""
    return any((directory / name).is_file() for directory in _include_directories())


def has_cuda_header() -> bool:
    """Whether `cuda.h` is where torch would look for CUDA."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    homes = [home, str(Path(nvcc).resolve().parents[1]) if nvcc else None, "/usr/local/cuda"]
    return has_header("cuda.h") or any((Path(one) / "include" / "cuda.h").is_file() for one in homes if one)


def _include_directories() -> list[Path]:
    """Of the environment, of the compiler's usual places, and of this Python's installation (conda)."""
    names = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
    given = [one for name in names for one in os.environ.get(name, "").split(os.pathsep) if one]
    flagged = re.findall(r"-I\s*(\S+)", os.environ.get("CFLAGS", "") + " " + os.environ.get("CXXFLAGS", ""))
    return [Path(one) for one in (*given, *flagged, "/usr/include", "/usr/local/include", f"{sys.prefix}/include")]
