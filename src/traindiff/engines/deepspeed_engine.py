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


def engine_settings(engine: Any) -> dict[str, Any]:
    """What of the engine's settings changes numbers, for `run.json`.

    Returns:
        JSON values: `zero_stage`, `gradient_clipping` (0 for none), `gradient_accumulation_steps`, `loss_scale` (of
        the first step; 1 for none), `dtype` of the model, `optimizer`, the class that makes the updates, and
        `asked_for`, what the configuration calls it (None where the training gave an optimizer).
    """
    asked_for = None if engine.client_optimizer is not None else engine.optimizer_name()
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "gradient_clipping": clipping_of(engine),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "loss_scale": float(getattr(engine.optimizer, "loss_scale", 1.0) or 1.0),
        "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
        "optimizer": type(engine.basic_optimizer).__name__ if engine.optimizer is not None else None,
        "asked_for": asked_for,
    }


def clipping_of(engine: Any) -> float:
    """To which norm the engine clips the gradients; 0 where it does not.

    The optimizer may have been given another one than the engine's configuration has.
    """
    return float(getattr(engine.optimizer, "clip_grad", engine.gradient_clipping()) or 0.0)
