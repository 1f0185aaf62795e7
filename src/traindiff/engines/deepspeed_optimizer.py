"""DeepSpeed's optimizers: each has a torch optimizer inside, which steps on tensors that DeepSpeed has made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from traindiff.engines.deepspeed_engine import find_engine
from traindiff.engines.deepspeed_parameters import kept_range, partition_size
from traindiff.shards import Piece, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor that the optimizer inside steps on.

    Attributes:
        group: Number of its parameter group.
        tensor: The local elements: master weights, flat or of one parameter.
        pieces: Which elements of which parameters it holds.
    """

    group: int
    tensor: Tensor
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptimizer:
    """An optimizer of DeepSpeed's.

    Attributes:
        outer: What the engine calls; a call of its `step` is a step.
        inner: The torch optimizers that make the updates: one, or two where a part is offloaded. Each is called once
            per parameter group, or more often, within a step.
        groups: The model's parameters in each group, by path.
        held: What the optimizers inside step on.
        clipping: To which norm gradients are clipped; 0 where they are not.
    """

    outer: Any
    inner: tuple[Optimizer, ...]
    groups: tuple[Mapping[str, nn.Parameter], ...]
    held: tuple[HeldTensor, ...]
    clipping: float


def find_optimizers(
    model: nn.Module, optimizers: Mapping[str, Any], names: Mapping[int, str]
) -> dict[str, Optimizer | EngineOptimizer]:
    """The optimizers whose steps are observed.

    Where a DeepSpeed engine has wrapped one of them, that is followed instead; and where none is given, the engine's
    own is taken.

    Args:
        model: The module that the training loop calls.
        optimizers: What the training gave, by name.
        names: Canonical path of every parameter of the model, by id.
    """
    outer = getattr(find_engine(model), "optimizer", None)
    if outer is not None and not optimizers:
        optimizers = {"optimizer": outer}
    found: dict[str, Optimizer | EngineOptimizer] = {}
    for name, one in optimizers.items():
        wrapper = outer if outer is not None and getattr(outer, "optimizer", None) is one else one
        if is_engine_optimizer(wrapper):
            found[name] = _opened(wrapper, _Names(name, names))
        else:
            found[name] = _bare(wrapper, _Names(name, names)) if _is_fused_adam(wrapper) else wrapper
    return found


def is_engine_optimizer(optimizer: object) -> bool:
    """Whether it is one of DeepSpeed's that keeps master weights of its own."""
    return isinstance(getattr(optimizer, "optimizer", None), Optimizer) and any(
        hasattr(optimizer, name) for name in _MASTERS
    )


def _is_fused_adam(optimizer: object) -> bool:
    """Whether it is DeepSpeed's FusedAdam, whose state does not say of each parameter how many steps it has taken."""
    kind = type(optimizer)
    return kind.__name__ == "FusedAdam" and kind.__module__.startswith("deepspeed.")


class _Names:
    """Paths of parameters; those that are none of the model's are named by group and position."""

    def __init__(self, optimizer: str, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names

    def of_group(self, number: int, parameters: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
        return {
            self._names.get(id(one), f"{self._optimizer}.groups[{number}].params[{position}]"): one
            for position, one in enumerate(parameters)
        }


_MASTERS = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat", "fp32_groups_flat_partition",
            "fp32_groups_flat", "fp32_groups")  # fmt: skip
"""Where these optimizers keep master weights; one has one of them."""


def _opened(outer: Any, names: _Names) -> EngineOptimizer:
    if hasattr(outer, "fp32_partitioned_groups_flat"):
        held, groups = _stage_3(outer, names)
    elif hasattr(outer, "single_partition_of_fp32_groups"):  # ZeRO stages 1 and 2
        # Flat tensors follow the order of these groups, also where `_hp_mapping` of the parameters does not.
        held, groups = _flat_groups(
            outer.single_partition_of_fp32_groups, outer.round_robin_bit16_groups, names, outer.real_dp_process_group
        )
    elif hasattr(outer, "fp32_groups_flat_partition"):  # BF16_Optimizer
        held, groups = _flat_groups(
            outer.fp32_groups_flat_partition, outer.bf16_groups, names, outer.real_dp_process_group
        )
    elif hasattr(outer, "fp32_groups_flat"):  # FP16_Optimizer: flat, and whole on every rank
        held, groups = _flat_groups(outer.fp32_groups_flat, outer.fp16_groups, names)
    else:  # FP16_UnfusedOptimizer: one master weight for each parameter
        held, groups = _whole(outer.fp32_groups, outer.fp16_groups, names)
    second = getattr(outer, "backup_optimizer", None)
    return EngineOptimizer(
        outer=outer,
        inner=(outer.optimizer,) if second is None else (outer.optimizer, second),
        groups=tuple(groups),
        held=tuple(held),
        clipping=float(getattr(outer, "clip_grad", 0.0) or 0.0),
    )


def _bare(optimizer: Optimizer, names: _Names) -> EngineOptimizer:
    """An optimizer of DeepSpeed's that steps on the model's own parameters."""
    own = [group["params"] for group in optimizer.param_groups]
    held, groups = _whole(own, own, names)
    return EngineOptimizer(outer=optimizer, inner=(optimizer,), groups=tuple(groups), held=tuple(held), clipping=0.0)


_Opened = tuple[list[HeldTensor], list[dict[str, nn.Parameter]]]


def _flat_groups(
    masters: Sequence[Tensor], groups: Sequence[Sequence[nn.Parameter]], names: _Names, ranks: Sequence[Any] = ()
) -> _Opened:
    """One flat tensor for each group, or this rank's part of it, all of equal length.

    Args:
        masters: The flat tensors.
        groups: The parameters in them, in their order.
        names: Their paths.
        ranks: Process groups among which each is divided; none where it is not.
    """
    held, named = [], []
    for number, (master, parameters) in enumerate(zip(masters, groups, strict=True)):
        by_path = names.of_group(number, parameters)
        first = distributed.get_rank(ranks[number]) * master.numel() if ranks else 0
        held.append(HeldTensor(group=number, tensor=master, pieces=tuple(_cut(by_path, first, master.numel()))))
        named.append(by_path)
    return held, named


def _cut(parameters: Mapping[str, nn.Parameter], first: int, size: int) -> Iterable[Piece]:
    """Pieces of parameters that lie one after the other in a range of the flat tensor that they make."""
    begin = 0
    for path, parameter in parameters.items():
        end = begin + parameter.numel()
        low, high = max(begin, first), min(end, first + size)
        if low < high:
            shard = Shard(shape=(high - low,), global_shape=tuple(parameter.shape), offset=(low - begin,))
            yield Piece(path=path, first=low - first, shard=shard)
        begin = end


def _stage_3(outer: Any, names: _Names) -> _Opened:
    """One flat tensor for each sub-group, in which each parameter has its part, padded."""
    held = []
    named: list[dict[str, nn.Parameter]] = [{} for _ in outer.optimizer.param_groups]
    for sub_group, (master, parameters) in enumerate(
        zip(outer.fp32_partitioned_groups_flat, outer.fp16_groups, strict=True)
    ):
        number = outer.sub_group_to_group_id[sub_group]
        by_path = names.of_group(number, parameters)
        first, pieces = 0, []
        for path, parameter in by_path.items():
            if (shard := kept_range(parameter)).size:
                pieces.append(Piece(path=path, first=first, shard=shard))
            first += partition_size(parameter)
        held.append(HeldTensor(group=number, tensor=master, pieces=tuple(pieces)))
        named[number].update(by_path)
    return held, named


def _whole(masters: Sequence[Sequence[Tensor]], groups: Sequence[Sequence[nn.Parameter]], names: _Names) -> _Opened:
    held, named = [], []
    for number, (own, parameters) in enumerate(zip(masters, groups, strict=True)):
        by_path = names.of_group(number, parameters)
        held += [
            HeldTensor(group=number, tensor=master, pieces=(Piece(path=path),))
            for path, master in zip(by_path, own, strict=True)
        ]
        named.append(by_path)
    return held, named
