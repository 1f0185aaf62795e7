"""What keeps a setup from running on this machine, found before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from traindiff.errors import Problem
from traindiff.setups import build_tools
from traindiff.setups.setup import DTYPES, ENGINES, OFFLOAD_DEVICES, OPTIMIZERS, PRECISIONS, Setup

_CHOICES = {
    "engine": ENGINES,
    "offload_device": OFFLOAD_DEVICES,
    "dtype": DTYPES,
    "precision": PRECISIONS,
    "optimizer": OPTIMIZERS,
}


def obstacles(setup: Setup) -> list[Problem]:
    """Everything that keeps `setup` from running here: what cannot be, and what this machine lacks.

    Nothing is built and DeepSpeed is not imported.

    Returns:
        Where in the setup, why it cannot be run, and what to install or write; empty if it can be run.
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
    """What makes no sense on any machine."""
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
    if setup.precision == "master" and setup.engine != "plain":
        yield Problem(
            where=f"{engine}, precision=master",
            what="is a way to compute on one process; engines have their own.",
            fix="Leave precision out, or write engine=plain.",
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
    """What DeepSpeed refuses, or accepts and does not do."""
    if setup.engine != "deepspeed":
        return
    where = f"zero_stage={setup.zero_stage}, offload_device={setup.offload_device}"
    if setup.offload_device == "nvme" and setup.zero_stage != 3:
        says = "is accepted and ignored by DeepSpeed, which offloads to NVMe in stage 3 only."
        yield Problem(where=where, what=says, fix="Write zero_stage=3, or offload_device=cpu.")
    elif setup.offload_device == "cpu" and setup.zero_stage == 0:
        says = "is accepted and ignored by DeepSpeed, which offloads from stage 1 on."
        yield Problem(where=where, what=says, fix="Write zero_stage=1, 2 or 3, or leave offload_device out.")
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
    """What is not installed, or left over from a build that was killed."""
    if setup.engine != "deepspeed":
        return
    if find_spec("deepspeed") is None:
        fix = "Install it: pip install 'traindiff[deepspeed]' (it takes a minute)."
        yield Problem(where="engine=deepspeed", what="needs deepspeed, which is not installed.", fix=fix)
    if setup.deepcompile:
        yield from _lacking_for_deepcompile()
    if setup.offload_device == "nvme" and not build_tools.has_header("libaio.h"):
        yield Problem(
            where="offload_device=nvme",
            what="needs libaio, whose header libaio.h was not found.",
            fix="Install it with: apt-get install libaio-dev (Debian, Ubuntu), or dnf install libaio-devel.",
        )
    for extension in built_extensions(setup):
        yield from _lacking_to_build(extension)


def built_extensions(setup: Setup) -> tuple[str, ...]:
    """Extensions that DeepSpeed compiles for the setup when they are first used, by the name of their folder."""
    found: list[str] = []
    if setup.optimizer == "engine":
        found.append("fused_adam" if setup.offload_device == "none" else "cpu_adam")
    if setup.offload_device == "nvme":
        found.append("async_io")
    return tuple(found)


def _lacking_for_deepcompile() -> Iterator[Problem]:
    if not build_tools.has_cuda_header():
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
    built = build_tools.is_built(extension)
    missing = [] if built else build_tools.missing_tools()
    if missing:
        yield Problem(
            where=where,
            what=f"is compiled when it is first used, and of what it takes this was not found: {', '.join(missing)}.",
            fix="Install them with: apt-get install g++ ninja-build, or pip install ninja; or write optimizer=torch.",
        )
    if (lock := build_tools.stale_lock(extension)) is not None:
        yield Problem(
            where=where,
            what=f"has been locked for {lock.age} by {lock.path}, and no compiler is running: a build was killed, and "
            "whoever needs the extension waits for ever.",
            fix=f"Remove {lock.path} and run again.",
        )
