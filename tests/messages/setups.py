"""What is said of setups that cannot be run here, and of recipes that lack what a setup needs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.tensor.parallel import ColwiseParallel

import traindiff
from tests.messages.provoking import Chapter
from tests.run.config import recipes as small
from traindiff.errors import ConfigError
from traindiff.run.config import obstacles
from traindiff.run.config import obstacles as build_tools
from traindiff.run.config.pipeline_parallel import captured_call, loss_of_output
from traindiff.run.config.request import Request
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.verify.recipe import prepared

chapter = Chapter("Setups: engines, dtypes, optimizers, compilers", [])
situation = chapter.situation


def told(patched: pytest.MonkeyPatch, setup: Setup, **lacking: Any) -> None:
    """Have the obstacles told of a machine without a GPU, and without anything else that is lacking."""
    machine: dict[str, Any] = {
        "has_header": lambda name: True, "has_cuda_header": lambda: True, "missing_tools": list,
        "is_built": lambda name: False, "compiler_runs": lambda: False, **lacking,
    }  # fmt: skip
    patched.setattr("torch.cuda.is_available", lambda: False)
    patched.setattr(obstacles, "find_spec", machine.pop("find_spec", lambda name: object()))
    for name, value in machine.items():
        patched.setattr(build_tools, name, value)
    raise ConfigError("verify(...)", obstacles.obstacles(setup))


def make(training: Any, setup: Setup = PLAIN, *, batch: bool = False) -> None:
    """Prepare a training under a setup, and train on a batch."""

    def train() -> Any:
        return training

    train.__qualname__ = "train"
    made = prepared(train, seed=0, asked_by="verify(...)", setup=setup)
    if batch:
        made.train_on(next(iter(made.batches)))


@situation("a setup with values that there are not")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    wrong: dict[str, Any] = {"engine": "fsdp3", "dtype": "half"}
    told(patched, Setup(**wrong, nproc=0, zero_stage=4, gradient_clipping=-1.0))


@situation("further ranks for what runs on one process, and what only DeepSpeed does")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    told(patched, Setup(nproc=2, zero_stage=1))


@situation("tensor parallelism on one rank")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    told(patched, Setup(engine="tp"))


@situation("a pipeline in further micro-batches, in float16")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    told(patched, Setup(engine="pp", nproc=2, gradient_accumulation_steps=2, dtype="float16"))


@situation("master weights under an engine")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    told(patched, Setup(engine="fsdp2", nproc=2, precision="master"))


@situation("DeepSpeed with nothing that it needs")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    told(
        patched,
        Setup(
            engine="deepspeed", nproc=2, zero_stage=2, offload_device="nvme", dtype="float16", optimizer="engine",
            deepcompile=True,
        ),
        find_spec=lambda name: None, has_header=lambda name: False, has_cuda_header=lambda: False,
        missing_tools=lambda: ["c++", "ninja"],
    )  # fmt: skip


@situation("what DeepSpeed accepts and does not do")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    told(patched, Setup(engine="deepspeed", offload_device="cpu", dtype="bfloat16", loss_scale=8.0))


@situation("a lock of a build of DeepSpeed's optimizer that was killed")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    lock = here / "fused_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    then = time.time() - 7300
    os.utime(lock, (then, then))
    patched.setenv("TORCH_EXTENSIONS_DIR", str(here))
    told(patched, Setup(engine="deepspeed", optimizer="engine"))


@situation("a recipe with loss and step")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    make(small.training(step=print))


@situation("a recipe without loss, under a setup")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    make(small.training(loss=None, step=print), Setup(engine="fsdp2", nproc=2))


@situation("a recipe with loss and no optimizer")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    make(small.training(optimizer=None))


@situation("a recipe that does not say how tensor parallelism divides it")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    make(small.training(tensor_parallel=None), Setup(engine="tp", nproc=2))


@situation("a recipe that does not say how a pipeline divides it")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    make(small.training(pipeline=None), Setup(engine="pp", nproc=2))


@situation("a fused optimizer of which there is none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = small.Model()
    make(small.training(model, optimizer=torch.optim.RMSprop(model.parameters())), Setup(optimizer="engine"))


@situation("a batch whose samples cannot be divided")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    make(small.training(), Setup(gradient_accumulation_steps=3), batch=True)


@situation("a batch without tensors")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    make(small.training(batches=range(9)), Setup(gradient_accumulation_steps=2), batch=True)


@situation("a batch whose tensors have different numbers of rows")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    batch = (torch.zeros(4), torch.zeros(6))
    make(small.training(batches=[batch]), Setup(gradient_accumulation_steps=2), batch=True)


@situation("a recipe's split that gives another number of parts")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = small.training(split=lambda batch, parts: [batch])
    make(made, Setup(gradient_accumulation_steps=2), batch=True)


# Under engines, with what they need in this process.


@contextmanager
def alone() -> Iterator[None]:
    """A process group of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def request(training: traindiff.Training, setup: Setup = PLAIN) -> Request:
    """What engines are asked for."""
    optimizer: Any = training.optimizer
    return Request(
        model=training.model, optimizer=optimizer, training=training, setup=setup, where="recipe train",
        asked_by="verify(...)",
    )  # fmt: skip


@situation("an optimizer that has state before its first step")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = small.Model()
    with alone():
        make(small.training(model, optimizer=torch.optim.Adagrad(model.parameters())), Setup(engine="fsdp2"))


@situation("an optimizer of tensors that the model does not have")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = small.Model()
    further = torch.zeros(3, requires_grad=True)
    with alone():
        make(small.training(model, optimizer=torch.optim.SGD([*model.parameters(), further])), Setup(engine="fsdp2"))


@situation("tied parameters that tensor parallelism divides differently")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    plan = {"head": ColwiseParallel()}
    with alone():
        make(small.training(small.Model(tied=True), tensor_parallel=plan), Setup(engine="tp", nproc=2))


@situation("a pipeline with fewer stages than ranks")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    patched.setattr(Request, "world_size", 4)
    make(small.training(small.TracedModel(), pipeline=["blocks.1", "blocks.2"]), Setup(engine="pp", nproc=4))


@situation("a pipeline that is traced, in a short dtype")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = small.training(small.TracedModel(), pipeline=["blocks.1", "blocks.2"])
    make(made, Setup(engine="pp", nproc=2, dtype="bfloat16"))


@situation("a pipeline whose loss does not call the model")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = small.training(loss=lambda model, batch: batch.float().mean())
    captured_call(request(made), small.batches(1)[0])


@situation("a pipeline whose loss calls the model twice")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    made = small.training(loss=lambda model, batch: model(batch) + model(batch))
    loss_of_output(request(made), torch.zeros(3), small.batches(1)[0])


@situation("an optimizer of which DeepSpeed has none")
def _(here: Path, patched: pytest.MonkeyPatch) -> None:
    model = small.Model()
    made = small.training(model, optimizer=torch.optim.SGD(model.parameters()))
    make(made, Setup(engine="deepspeed", nproc=2, optimizer="engine"))
