"""Obstacles that keep a setup from running on this machine, found before anything starts."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from traindiff.errors import Problem
from traindiff.run.config.setup import DTYPES, ENGINES, OFFLOAD_DEVICES, OPTIMIZERS, PRECISIONS, Setup

_COMPILERS = ("ninja", "cc1plus", "c++", "g++", "clang", "clang++", "nvcc", "cicc")
"""Names of processes of which one runs while an extension is built."""

_STARTING_SECONDS = 30.0
"""How long a build may hold its lock before its compiler starts, or after it has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleLock:
    """A lock file that no running build holds."""

    path: Path
    age_seconds: float

    @property
    def age(self) -> str:
        """The age as messages say it: `3 hours`."""
        for unit, seconds in (("day", 86400), ("hour", 3600), ("minute", 60)):
            if (count := int(self.age_seconds // seconds)) >= 1:
                return f"{count} {unit}{'s' if count > 1 else ''}"
        return f"{self.age_seconds:.0f} seconds"


def extensions_directory() -> Path:
    """The directory in which torch builds extensions: one folder for each, with a file `lock` while it is built."""
    if chosen := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(chosen)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cuda, hip = torch.version.cuda, torch.version.hip
    accelerator = f"rocm{hip.replace('.', '')}" if hip else f"cu{cuda.replace('.', '')}" if cuda else "cpu"
    return (
        cache / "torch_extensions" / f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_{accelerator}"
    )


def is_built(extension: str) -> bool:
    """True if the extension's library exists, so that it is probably not compiled again."""
    return any((extensions_directory() / extension).glob("*.so"))


def stale_lock(extension: str) -> StaleLock | None:
    """The extension's lock if nothing builds it: no process holds it, it is not new, and no compiler runs."""
    path = extensions_directory() / extension / "lock"
    try:
        age = time.time() - path.stat().st_mtime
    except OSError:
        return None
    if age < _STARTING_SECONDS or compiler_runs() or is_open(path):
        return None
    return StaleLock(path=path, age_seconds=age)


def compiler_runs(processes: Path = Path("/proc")) -> bool:
    """True if a compiler runs on this machine; False if that cannot be seen."""
    for name in processes.glob("[0-9]*/comm"):
        try:
            command = name.read_text().strip()
        except OSError:
            continue  # the process has just ended
        if re.sub(r"-[\d.]+$", "", command) in _COMPILERS:
            return True
    return False


def is_open(path: Path, processes: Path = Path("/proc")) -> bool:
    """True if a process has the file open, as torch has a lock while it builds; False if that cannot be seen."""
    place = os.fspath(path.resolve())
    for opened in processes.glob("[0-9]*/fd/*"):
        try:
            if os.fspath(opened.readlink()) == place:
                return True
        except OSError:
            continue  # it has just been closed, or belongs to another user
    return False


def missing_tools() -> list[str]:
    """Tools that compile an extension and are not installed."""
    compiler = os.environ.get("CXX", "c++")
    return [tool for tool in (compiler, "ninja") if shutil.which(tool) is None]


def has_header(name: str) -> bool:
    """True if a compiler would find the header."""
    return any((directory / name).is_file() for directory in _include_directories())


def has_cuda_header() -> bool:
    """True if `cuda.h` is where torch would look for CUDA."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc")
    homes = [home, str(Path(nvcc).resolve().parents[1]) if nvcc else None, "/usr/local/cuda"]
    return has_header("cuda.h") or any((Path(one) / "include" / "cuda.h").is_file() for one in homes if one)


def _include_directories() -> list[Path]:
    """Include directories of the environment, of the compiler's defaults, and of this Python's installation (conda)."""
    names = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
    given = [one for name in names for one in os.environ.get(name, "").split(os.pathsep) if one]
    flagged = re.findall(r"-I\s*(\S+)", os.environ.get("CFLAGS", "") + " " + os.environ.get("CXXFLAGS", ""))
    return [Path(one) for one in (*given, *flagged, "/usr/include", "/usr/local/include", f"{sys.prefix}/include")]


_CHOICES = {
    "engine": ENGINES,
    "offload_device": OFFLOAD_DEVICES,
    "dtype": DTYPES,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
}


def obstacles(setup: Setup) -> list[Problem]:
    """Everything that keeps `setup` from running here: impossible combinations, and what this machine lacks.

    Nothing is built and DeepSpeed is not imported.

    Returns:
        Which setting, why it cannot be run, and what to install or write; empty if the setup can be run.
    """
    problems = list(_unusable_values(setup))
    return problems or [*_combinations(setup), *_limits_of_deepspeed(setup), *_lacking(setup)]


def _unusable_values(setup: Setup) -> Iterator[Problem]:
    for name, known in _CHOICES.items():
        if (found := str(getattr(setup, name))) not in known:
            yield Problem.unknown_name(where=f"{name}={found}", kind=f"a choice of {name}", found=found, known=known)
    for name, least in (("nproc", 1), ("gradient_accumulation_steps", 1)):
        if (count := getattr(setup, name)) < least:
            fix = f"Write {name}={least}."
            yield Problem(where=f"{name}={count}", what=f"must be a whole number, at least {least}.", fix=fix)
    if setup.zero_stage not in range(4):
        yield Problem(
            where=f"zero_stage={setup.zero_stage}", what="is no stage of ZeRO.", fix="Write zero_stage=0, 1, 2 or 3."
        )
    for name in ("gradient_clipping", "loss_scale"):
        if (getattr(setup, name) or 0.0) < 0.0:
            where = f"{name}={getattr(setup, name):g}"
            yield Problem(where=where, what="is below 0.", fix=f"Write a positive number, or leave {name} out.")


def _combinations(setup: Setup) -> Iterator[Problem]:
    """Combinations that make no sense on any machine."""
    engine, nproc = f"engine={setup.engine}", f"nproc={setup.nproc}"
    if setup.engine == "plain" and setup.nproc > 1:
        fix = "Write engine=ddp, or another engine that divides the training, or nproc=1."
        yield Problem(
            where=f"{engine}, {nproc}", what="is PyTorch on one process, with nothing for further ranks.", fix=fix
        )
    if setup.engine in ("tp", "pp") and setup.nproc < 2:
        yield Problem(
            where=f"{engine}, {nproc}", what="divides the model among at least 2 ranks.", fix="Write nproc=2."
        )
    if setup.engine == "pp" and setup.gradient_accumulation_steps > 1:
        yield Problem(
            where=f"{engine}, gradient_accumulation_steps={setup.gradient_accumulation_steps}",
            what="would accumulate twice: a pipeline computes the batch in micro-batches anyway, one per rank.",
            fix="Leave gradient_accumulation_steps out.",
        )
    if setup.engine in ("tp", "pp") and (setup.dtype == "float16" or setup.loss_scale is not None):
        yield Problem(
            where=f"{engine}, dtype={setup.dtype}, loss_scale={setup.loss_scale}",
            what="needs a GradScaler that looks at the gradients of all ranks, and torch's does not where ranks divide "
            "the model.",
            fix="Use bfloat16 or float32, without a loss scale.",
        )
    if setup.precision == "master" and setup.engine not in ("plain", "ddp"):
        yield Problem(
            where=f"{engine}, precision=master",
            what="is a way to compute with plain PyTorch or DDP; other engines have their own.",
            fix="Leave precision out, or write engine=plain or engine=ddp.",
        )
    if setup.engine != "deepspeed":
        for name, value, default in (
            ("zero_stage", setup.zero_stage, 0),
            ("offload_device", setup.offload_device, "none"),
            ("deepcompile", setup.deepcompile, False),
        ):
            if value != default:
                fix = f"Write engine=deepspeed, or leave {name} out."
                yield Problem(where=f"{engine}, {name}={value}", what="is something that only DeepSpeed does.", fix=fix)


def _limits_of_deepspeed(setup: Setup) -> Iterator[Problem]:
    """Settings that DeepSpeed refuses, or accepts and ignores."""
    if setup.engine != "deepspeed":
        return
    where = f"zero_stage={setup.zero_stage}, offload_device={setup.offload_device}"
    if setup.offload_device == "nvme" and setup.zero_stage != 3:
        message = "is accepted and ignored by DeepSpeed, which offloads to NVMe in stage 3 only."
        yield Problem(where=where, what=message, fix="Write zero_stage=3, or offload_device=cpu.")
    elif setup.offload_device == "cpu" and setup.zero_stage == 0:
        message = "is accepted and ignored by DeepSpeed, which offloads from stage 1 on."
        yield Problem(where=where, what=message, fix="Write zero_stage=1, 2 or 3, or leave offload_device out.")
    if setup.dtype == "float16" and not torch.cuda.is_available():
        yield Problem(
            where="engine=deepspeed, dtype=float16",
            what="is refused by DeepSpeed on a CPU, and no GPU is here.",
            fix="Use bfloat16 or float32, or a machine with a GPU.",
        )
    if setup.loss_scale is not None and setup.dtype != "float16":
        yield Problem(
            where=f"engine=deepspeed, dtype={setup.dtype}, loss_scale={setup.loss_scale:g}",
            what="is ignored by DeepSpeed, which scales the loss in float16 only.",
            fix="Leave loss_scale out, or write dtype=float16.",
        )


def _lacking(setup: Setup) -> Iterator[Problem]:
    """Packages that are not installed, and locks left over from a killed build."""
    if setup.engine != "deepspeed":
        return
    if find_spec("deepspeed") is None:
        fix = "Install it: pip install 'traindiff[deepspeed]' (it takes a minute)."
        yield Problem(where="engine=deepspeed", what="needs deepspeed, which is not installed.", fix=fix)
    if setup.deepcompile:
        yield from _lacking_for_deepcompile()
    if setup.offload_device == "nvme" and not has_header("libaio.h"):
        yield Problem(
            where="offload_device=nvme",
            what="needs libaio, whose header libaio.h was not found.",
            fix="Install it with: apt-get install libaio-dev (Debian, Ubuntu), or dnf install libaio-devel.",
        )
    for extension in built_extensions(setup):
        yield from _lacking_to_build(extension)


def built_extensions(setup: Setup) -> tuple[str, ...]:
    """Extensions that DeepSpeed compiles on first use for the setup, by the name of their folder."""
    found: list[str] = []
    if setup.optimizer == "engine":
        found.append("fused_adam" if setup.offload_device == "none" else "cpu_adam")
    if setup.offload_device == "nvme":
        found.append("async_io")
    return tuple(found)


def _lacking_for_deepcompile() -> Iterator[Problem]:
    if not has_cuda_header():
        yield Problem(
            where="deepcompile=True",
            what="is built with the headers of CUDA, and cuda.h was not found.",
            fix="Install the CUDA toolkit and set CUDA_HOME, or use compile without deepcompile.",
        )
    if not torch.cuda.is_available():
        yield Problem(
            where="deepcompile=True",
            what="runs on GPUs only, and none is here.",
            fix="Use a machine with a GPU, or compile without deepcompile.",
        )


def _lacking_to_build(extension: str) -> Iterator[Problem]:
    where = f"DeepSpeed's {extension}"
    built = is_built(extension)
    missing = [] if built else missing_tools()
    if missing:
        yield Problem(
            where=where,
            what=f"is compiled when it is first used, and of what it takes this was not found: {', '.join(missing)}.",
            fix="Install them with: apt-get install g++ ninja-build, or pip install ninja; or write optimizer=torch.",
        )
    if (lock := stale_lock(extension)) is not None:
        yield Problem(
            where=where,
            what=f"has been locked for {lock.age} by {lock.path}, and no compiler is running: a build was killed, and "
            "whoever needs the extension waits for ever.",
            fix=f"Remove {lock.path} and run again.",
        )
