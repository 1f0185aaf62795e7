"""DeepSpeed's optimizers: each has a torch optimizer inside, which steps on tensors made by DeepSpeed."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from traindiff.core.shards import Piece, Shard
from traindiff.core.site import path_in_optimizer
from traindiff.core.torch_compat.training import FORWARD_PRE_HOOKS
from traindiff.errors import UnsupportedTensorError


def shape_before_zero(parameter: Any) -> tuple[int, ...] | None:
    """The global shape of a parameter of ZeRO stage 3, whose own is `(0,)` until it is gathered; else None."""
    return tuple(parameter.ds_shape) if hasattr(parameter, "ds_tensor") else None


def kept_by_zero(parameter: Any) -> tuple[Tensor, Shard] | None:
    """The elements of a ZeRO stage 3 parameter that this rank keeps, without padding, and their place; else None.

    They hold the value of the parameter also while it is gathered, as small ones always are: only the optimizer
    writes to it.

    Raises:
        UnsupportedTensorError: The elements are on disk just now.
    """
    if not hasattr(parameter, "ds_tensor"):
        return None
    kept: Tensor = parameter.ds_tensor
    shard = kept_range(parameter)
    if kept.numel() < shard.size:
        raise UnsupportedTensorError("ZeRO has moved the parameter to NVMe")
    return kept.detach().reshape(-1)[: shard.size], shard


def kept_range(parameter: Any) -> Shard:
    """The range of a partitioned parameter that this rank keeps; empty if it keeps only padding."""
    size, every = partition_size(parameter), int(parameter.ds_numel)
    first = min(distributed.get_rank(parameter.ds_process_group) * size, every)
    return Shard(shape=(min(size, every - first),), global_shape=tuple(parameter.ds_shape), offset=(first,))


def partition_size(parameter: Any) -> int:
    """Number of elements that each rank keeps, with padding."""
    return int(parameter.ds_tensor.ds_numel)


def find_engine(model: nn.Module) -> Any:
    """The DeepSpeedEngine of a model, which is the engine or the module that it wraps; None if there is none.

    Imports nothing: if there is an engine, deepspeed is loaded.
    """
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is None:
        return None
    kind = deepspeed.DeepSpeedEngine
    if isinstance(model, kind):
        return model
    # A wrapped module does not know its engine; but hooks on it do, which the engine defines in a method of its own.
    for hook in getattr(model, FORWARD_PRE_HOOKS).values():
        for cell in getattr(hook, "__closure__", None) or ():
            if isinstance(cell.cell_contents, kind) and cell.cell_contents.module is model:
                return cell.cell_contents
    return None


def engine_settings(model: nn.Module) -> dict[str, Any] | None:
    """The settings of a DeepSpeed engine that change numbers, for `run.json`; None if there is no engine.

    Returns:
        JSON values: `name`, `zero_stage`, `gradient_clipping` (the norm; 0 for none),
        `gradient_accumulation_steps`, `loss_scale` (of the first step; 1 for none), `dtype` of the model, `optimizer`
        (the class that makes the updates), for an Adam `decoupled_weight_decay`, and `asked_for` (its name in the
        configuration; None if the training gave an optimizer).
    """
    engine = find_engine(model)
    if engine is None:
        return None
    inner = getattr(engine, "basic_optimizer", None)
    return {
        "name": type(engine).__name__,
        "zero_stage": int(engine.zero_optimization_stage()),
        # The optimizer may clip to another norm than the configuration of the engine says.
        "gradient_clipping": float(getattr(engine.optimizer, "clip_grad", engine.gradient_clipping()) or 0.0),
        "gradient_accumulation_steps": int(engine.gradient_accumulation_steps()),
        "loss_scale": loss_scale_of(engine.optimizer),
        "dtype": str(engine.get_data_types()[0]).removeprefix("torch."),
        "optimizer": inner and type(inner).__name__,
        "decoupled_weight_decay": decouples_weight_decay(inner),
        "asked_for": None if engine.client_optimizer else engine.optimizer_name(),
    }


def loss_scale_of(optimizer: Any) -> float:
    """The current loss scale of a DeepSpeed optimizer; 1 for other optimizers."""
    return float(getattr(optimizer, "loss_scale", 1.0) or 1.0)


def decouples_weight_decay(optimizer: Any) -> bool | None:
    """True if an Adam decays weights as AdamW does; None for other optimizers."""
    mode = getattr(optimizer, "adam_w_mode", None)  # DeepSpeed's own
    groups = getattr(optimizer, "param_groups", None) or [{}]
    found = groups[0].get("decoupled_weight_decay") if mode is None else mode
    return None if found is None else bool(found)


class HeldTensor(NamedTuple):
    """A tensor that the inner optimizer steps on.

    Attributes:
        group: Number of its parameter group.
        tensor: The local elements of master weights, flat or of one parameter.
        pieces: The elements of parameters that it holds.
    """

    group: int
    tensor: Tensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptimizer:
    """An optimizer of DeepSpeed.

    Attributes:
        outer: The optimizer that the engine calls; a call of its `step` is a step.
        inner: The torch optimizers that make the updates: one, or two if a part is offloaded. Within a step, each is
            called once per parameter group, or more often.
        groups: The model's parameters in each group, by path.
        held: The tensors that the inner optimizers step on.
        clipping: The norm to which gradients are clipped; 0 for none.
    """

    outer: Any
    inner: tuple[Optimizer, ...]
    groups: tuple[Mapping[str, nn.Parameter], ...]
    held: tuple[HeldTensor, ...]
    clipping: float


def find_optimizers(
    model: nn.Module, optimizers: Mapping[str, Any], names: Mapping[int, str]
) -> dict[str, Optimizer | EngineOptimizer]:
    """The optimizers whose steps are observed: given ones, or the wrapper that a DeepSpeed engine has put around one.

    Without given optimizers, the engine's own optimizer is observed.

    Args:
        model: The module that the training loop calls.
        optimizers: The optimizers that the training gave, by name.
        names: Canonical path of every parameter of the model, by id.
    """
    outer = getattr(find_engine(model), "optimizer", None)
    if outer is not None and not optimizers:
        optimizers = {"optimizer": outer}
    found: dict[str, Optimizer | EngineOptimizer] = {}
    for name, one in optimizers.items():
        wrapper = outer if outer is not None and getattr(outer, "optimizer", None) is one else one
        followed = is_engine_optimizer(wrapper) or _is_fused_adam(wrapper)
        found[name] = _opened(wrapper, name, names) if followed else wrapper
    return found


def is_engine_optimizer(optimizer: object) -> bool:
    """True if this is a DeepSpeed optimizer that keeps master weights of its own."""
    return isinstance(getattr(optimizer, "optimizer", None), Optimizer) and any(
        hasattr(optimizer, name) for name in _MASTERS
    )


def _is_fused_adam(optimizer: object) -> bool:
    """True if this is DeepSpeed's FusedAdam, whose state does not count the steps of each parameter."""
    kind = type(optimizer)
    return kind.__name__ == "FusedAdam" and kind.__module__.startswith("deepspeed.")


_ZERO_3 = "fp32_partitioned_groups_flat"

_MASTERS: Mapping[str, tuple[str, bool]] = {
    _ZERO_3: ("fp16_groups", False),  # a flat tensor for each part of a group, which has the ranges of this rank
    # ZeRO stages 1 and 2. Flat tensors follow the order of these groups, also where `_hp_mapping` of the parameters
    # does not.
    "single_partition_of_fp32_groups": ("round_robin_bit16_groups", True),
    "fp32_groups_flat_partition": ("bf16_groups", True),  # BF16_Optimizer
    "fp32_groups_flat": ("fp16_groups", False),  # FP16_Optimizer: flat, and whole on every rank
    "fp32_groups": ("fp16_groups", False),  # FP16_UnfusedOptimizer: a list with a tensor for each parameter
}
"""Attributes in which these optimizers keep master weights; each class has one of them.

Each comes with the attribute of the parameters in them, and whether they are divided among ranks in equal parts.
"""


def _opened(outer: Any, name: str, names: Mapping[int, str]) -> EngineOptimizer:
    """The optimizer with the tensors that it steps on.

    Args:
        outer: A DeepSpeed optimizer: one that keeps master weights, or a FusedAdam.
        name: Its name.
        names: Canonical paths of parameters, by id. Other parameters are named by group and position.
    """
    inner = getattr(outer, "optimizer", outer)
    kept = next((one for one in _MASTERS if hasattr(outer, one)), "")
    if kept:
        parameters_in, is_divided = _MASTERS[kept]
        masters, groups = getattr(outer, kept), getattr(outer, parameters_in)
    else:  # FusedAdam steps on the model's own parameters
        masters, is_divided = [group["params"] for group in outer.param_groups], False
        groups = masters
    held: list[HeldTensor] = []
    named: list[dict[str, nn.Parameter]] = [{} for _ in inner.param_groups]
    for index, (master, parameters) in enumerate(zip(masters, groups, strict=True)):
        number = outer.sub_group_to_group_id[index] if kept == _ZERO_3 else index
        by_path = {
            names.get(id(one), path_in_optimizer(name, number, position)): one
            for position, one in enumerate(parameters)
        }
        named[number].update(by_path)
        if isinstance(master, list):  # of a tensor for each parameter
            held += [HeldTensor(number, one, (Piece(path=path),)) for path, one in zip(by_path, master, strict=True)]
            continue
        first = distributed.get_rank(outer.real_dp_process_group[index]) * master.numel() if is_divided else 0
        pieces = _padded(by_path) if kept == _ZERO_3 else _cut(by_path, first, master.numel())
        held.append(HeldTensor(number, master, tuple(pieces)))
    second = getattr(outer, "backup_optimizer", None)
    return EngineOptimizer(
        outer=outer,
        inner=(inner,) if second is None else (inner, second),
        groups=tuple(named),
        held=tuple(held),
        clipping=float(getattr(outer, "clip_grad", 0.0) or 0.0),
    )


def _cut(parameters: Mapping[str, nn.Parameter], first: int, size: int) -> Iterator[Piece]:
    """The pieces of parameters in a range of the flat tensor in which they lie one after the other."""
    begin = 0
    for path, parameter in parameters.items():
        end = begin + parameter.numel()
        low, high = max(begin, first), min(end, first + size)
        if low < high:
            shard = Shard(shape=(high - low,), global_shape=tuple(parameter.shape), offset=(low - begin,))
            yield Piece(path=path, first=low - first, shard=shard)
        begin = end


def _padded(parameters: Mapping[str, nn.Parameter]) -> Iterator[Piece]:
    """The pieces in a flat tensor of ZeRO stage 3, which has the padded part of each parameter."""
    first = 0
    for path, parameter in parameters.items():
        if (shard := kept_range(parameter)).size:
            yield Piece(path=path, first=first, shard=shard)
        first += partition_size(parameter)
