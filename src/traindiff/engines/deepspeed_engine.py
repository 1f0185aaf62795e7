"""DeepSpeed's engine: found by the model that it wraps, and what its settings make of a training."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


def find_engine(model: nn.Module) -> Any:
    """The DeepSpeedEngine of a model, given itself or the module that it wraps; None if there is none.

    Imports nothing: where there is one, deepspeed is loaded.
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None:
        return None
    kind = deepspeed.DeepSpeedEngine
    if isinstance(model, kind):
        return model
    # A wrapped module does not know its engine; but hooks on it do, which the engine defines in a method of its own.
    for hook in model._forward_pre_hooks.values():
        for cell in getattr(hook, "__closure__", None) or ():
            if isinstance(cell.cell_contents, kind) and cell.cell_contents.module is model:
                return cell.cell_contents
    return None


def engine_settings(model: nn.Module) -> dict[str, Any] | None:
    """What of an engine's settings changes numbers, for `run.json`; None where no engine of DeepSpeed's is found.

    Returns:
        JSON values: `name`, `zero_stage`, `gradient_clipping` (to which norm; 0 for none),
        `gradient_accumulation_steps`, `loss_scale` (of the first step; 1 for none), `dtype` of the model, `optimizer`,
        the class that makes the updates, with `decoupled_weight_decay` if that is an Adam, and `asked_for`, what the
        configuration calls it (None where the training gave an optimizer).
    """
    engine = find_engine(model)
    if engine is None:
        return None
    inner = getattr(engine, "basic_optimizer", None)
    return {
        "name": type(engine).__name__,
        "zero_stage": int(engine.zero_optimization_stage()),
        "gradient_clipping": clipping_of(engine),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "loss_scale": loss_scale_of(engine.optimizer),
        "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
        "optimizer": inner and type(inner).__name__,
        "decoupled_weight_decay": decouples_weight_decay(inner),
        "asked_for": None if engine.client_optimizer else engine.optimizer_name(),
    }


def clipping_of(engine: Any) -> float:
    """To which norm the engine clips the gradients; 0 where it does not.

    The optimizer may have been given another one than the engine's configuration has.
    """
    return float(getattr(engine.optimizer, "clip_grad", engine.gradient_clipping()) or 0.0)


def loss_scale_of(optimizer: Any) -> float:
    """By what one of DeepSpeed's optimizers divides gradients now; 1 for others."""
    return float(getattr(optimizer, "loss_scale", 1.0) or 1.0)


def decouples_weight_decay(optimizer: Any) -> bool | None:
    """Whether an Adam decays weights as AdamW does; None for other optimizers."""
    mode = getattr(optimizer, "adam_w_mode", None)  # DeepSpeed's own
    groups = getattr(optimizer, "param_groups", None) or [{}]
    found = groups[0].get("decoupled_weight_decay") if mode is None else mode
    return None if found is None else bool(found)
