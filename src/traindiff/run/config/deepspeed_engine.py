"""Trainings under DeepSpeed's engine, with ZeRO stages 0 to 3."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from traindiff.run.config.precision import round_inputs
from traindiff.run.config.request import Request
from traindiff.run.config.setup import Setup
from traindiff.run.config.training import Training

_DYNAMIC = 0
"""DeepSpeed's `loss_scale` for a dynamic scale."""


def build(request: Request) -> Training:
    """The training under DeepSpeed's engine, which does everything from the backward pass on.

    Raises:
        ConfigError: DeepSpeed has no implementation of the recipe's optimizer, and the setup asks for one.
    """
    setup, optimizer = request.setup, request.optimizer
    round_inputs(request.model, setup)
    config = configuration(setup)
    if setup.optimizer == "engine":
        config["optimizer"] = _own_optimizer(request)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DeepSpeed uses names that torch has renamed
        import deepspeed
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it on first use would take minutes
        engine, *_ = deepspeed.initialize(
            model=request.model,
            model_parameters=optimizer.param_groups if setup.optimizer == "engine" else None,
            optimizer=optimizer if setup.optimizer == "torch" else None,
            config=config,
        )
        if setup.compile or setup.deepcompile:
            engine.compile()

    def step(batch: Any) -> Tensor:
        shares = request.micro_batches(batch, part=request.rank, parts=request.world_size)
        total = torch.zeros((), device=request.device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            for share in shares:
                loss = request.loss(engine, share)
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(shares)
        return total

    return replace(request.training, model=engine, optimizer=engine.optimizer, step=step)


def configuration(setup: Setup) -> dict[str, Any]:
    """DeepSpeed's configuration for a setup, with explicit values where DeepSpeed's defaults would change the numbers.

    - Gradients are clipped only if the setup says so. DeepSpeed clips by default since 0.19.3.
    - The recipe's own optimizer is used unchanged.
    - Stage 3 shards small parameters too.
    - Stage 3 keeps `torch.nn.functional.linear`: the one that DeepSpeed installs for the whole process rounds
      differently.
    """
    zero: dict[str, Any] = {"stage": setup.zero_stage}
    if setup.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
        zero["memory_efficient_linear"] = False
    if setup.offload_device != "none":
        zero["offload_optimizer"] = {"device": setup.offload_device}
    if setup.offload_device == "nvme":
        zero["offload_optimizer"]["nvme_path"] = str(Path(tempfile.gettempdir()) / "traindiff-nvme")
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only for DeepSpeed's own reports
        "gradient_accumulation_steps": setup.gradient_accumulation_steps,
        "gradient_clipping": setup.gradient_clipping,
        "steps_per_print": None,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": setup.optimizer == "engine",
    }
    if setup.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    if setup.dtype == "float16":
        config["fp16"] = {"enabled": True, "loss_scale": setup.loss_scale or _DYNAMIC}
    if setup.deepcompile:
        config["compile"] = {"deepcompile": True}
    return config


def _own_optimizer(request: Request) -> dict[str, Any]:
    """The configuration of DeepSpeed's implementation of the recipe's optimizer, with its settings."""
    kinds = {torch.optim.Adam: False, torch.optim.AdamW: True}
    made = type(request.optimizer)
    if made not in kinds:
        raise request.lacks(
            "optimizer",
            message=f"is {made.__name__}, of which DeepSpeed has no implementation that optimizer=engine could use.",
            fix="Use torch.optim's Adam or AdamW, or write optimizer=torch.",
        )
    settings = {name: request.optimizer.defaults[name] for name in ("lr", "betas", "eps", "weight_decay")}
    return {"type": "Adam", "params": {**settings, "adam_w_mode": kinds[made]}}
