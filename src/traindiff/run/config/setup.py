"""The setup of a run: engine, dtype, optimizer and compiler."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

Engine = Literal["plain", "ddp", "fsdp1", "fsdp2", "tp", "pp", "deepspeed"]
ENGINES: tuple[str, ...] = get_args(Engine)

Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)

OffloadDevice = Literal["none", "cpu", "nvme"]
OFFLOAD_DEVICES: tuple[str, ...] = get_args(OffloadDevice)

Precision = Literal["autocast", "master"]
PRECISIONS: tuple[str, ...] = get_args(Precision)

OptimizerChoice = Literal["torch", "engine"]
OPTIMIZERS: tuple[str, ...] = get_args(OptimizerChoice)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Under which engine, in which dtype, with which optimizer and compiler a training runs.

    Attributes:
        engine: What divides the training among ranks; `plain` is PyTorch on one process.
        nproc: Number of ranks.
        zero_stage: Of DeepSpeed's ZeRO, 0 to 3.
        offload_device: Where DeepSpeed keeps the optimizer's state.
        dtype: In which the model computes.
        precision: How a short dtype is used outside of FSDP and DeepSpeed, which have ways of their own. `autocast`:
            as `torch.autocast` chooses operator by operator; `master` (`plain` and `ddp`): every operator in the short
            dtype, on parameters rounded from float32 ones, which the optimizer keeps.
        optimizer: `torch`: the recipe's own; `engine`: the engine's implementation of it.
        compile: Compile the model with `torch.compile`, or with the engine's own call of it.
        deepcompile: Let DeepSpeed's DeepCompile change the compiled graphs.
        gradient_accumulation_steps: Micro-batches in which each rank computes its part of the batch.
        gradient_clipping: Largest norm of all gradients together; 0 for none.
        loss_scale: What the loss is multiplied by before the backward pass; None for the dtype's usual (dynamic
            in float16, else none), 0 for dynamic.
    """

    engine: Engine = "plain"
    nproc: int = 1
    zero_stage: int = 0
    offload_device: OffloadDevice = "none"
    dtype: Dtype = "float32"
    precision: Precision = "autocast"
    optimizer: OptimizerChoice = "torch"
    compile: bool = False
    deepcompile: bool = False
    gradient_accumulation_steps: int = 1
    gradient_clipping: float = 0.0
    loss_scale: float | None = None

    @property
    def message(self) -> str:
        """The engine and all settings that are not the default, in one line: `deepspeed, zero_stage=2, nproc=2`."""
        settings = [
            f"{one.name}={getattr(self, one.name)}"
            for one in fields(self)
            if one.name != "engine" and getattr(self, one.name) != one.default
        ]
        return ", ".join([self.engine, *settings])

    def to_json(self) -> dict[str, Any]:
        """All settings, by name."""
        return asdict(self)


def baseline_setup(setup: Setup) -> Setup:
    """The trusted way to compute the same as `setup`: PyTorch on one process, with the same mathematics.

    Dtype, clipping and loss scale are those of `setup`, because they change what is computed. Engine, ranks,
    micro-batches, compiler, offloading and implementation of the optimizer should change nothing, and are left out.

    FSDP and DeepSpeed compute in a short dtype on parameters rounded from float32 ones; the baseline then does the
    same. It also has one micro-batch for each part of the batch that a rank computes. Some kernels add up gradients
    over samples in the short dtype, and round more the more samples there are: LayerNorm's on a CPU, in bfloat16, is
    off by 2.5% over 512 rows.
    """
    masters = setup.engine in ("fsdp1", "fsdp2", "deepspeed") and setup.dtype != "float32"
    return Setup(
        dtype=setup.dtype,
        precision="master" if masters else setup.precision,
        gradient_accumulation_steps=setup.nproc * setup.gradient_accumulation_steps if masters else 1,
        gradient_clipping=setup.gradient_clipping,
        loss_scale=setup.loss_scale,
    )


PLAIN = Setup()
"""PyTorch on one process, in float32, with the recipe's own optimizer."""
