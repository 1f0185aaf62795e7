"""Copies of the baseline, which are perturbed within rounding and stepped along: they measure the baseline's noise."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from traindiff.engines.distributed_tensor import is_distributed
from traindiff.lockstep.stepped import Stepped, made
from traindiff.replicas.compiled import compiled_parts

REPLICAS = ("ulp:1", "ulp:2")
"""How the copies are perturbed; two, so that each can be held against the other."""


def uncopyable(baseline: Stepped) -> str:
    """Why a side cannot be copied, in a few words that follow "the baseline"; empty where it can be."""
    model = baseline.model
    if baseline.loss is None:
        return "has a step of its own"
    if not baseline.optimizers or not all(isinstance(one, Optimizer) for one in baseline.optimizers):
        return "has no optimizer of torch's"
    if compiled_parts(model):
        return "is compiled"
    if any(is_distributed(parameter) for parameter in model.parameters()) or _is_flattened(model):
        return "is divided among ranks"
    if _process_group(model) is not None and _process_group(model) is not torch.distributed.group.WORLD:
        return "reduces over a process group of its own"
    return ""


def copied(baseline: Stepped) -> list[Stepped]:
    """Two copies of a side that `uncopyable` has nothing against: model and optimizer as they are now."""
    assert baseline.loss is not None
    found = []
    for replica in REPLICAS:
        model, optimizer = copy.deepcopy((baseline.model, baseline.optimizer))
        one = made(model, optimizer, name=f"baseline, {replica}", loss=baseline.loss, record=baseline.record)
        for own in one.optimizers:
            vars(own).pop("step", None)  # as a schedule leaves it behind: it steps the optimizer that was copied
        found.append(one)
    return found


def follow_settings(baseline: Stepped, copies: list[Stepped]) -> None:
    """Give the copies' optimizers the settings that the baseline's have now: a schedule may have changed them."""
    for one in copies:
        for source, target in zip(baseline.optimizers, one.optimizers, strict=True):
            for given, group in zip(source.param_groups, target.param_groups, strict=True):
                group.update((name, value) for name, value in given.items() if name != "params")


def _is_flattened(model: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in model.modules())


def _process_group(model: nn.Module) -> Any:
    wrapper = nn.parallel.DistributedDataParallel
    return model.process_group if isinstance(model, wrapper) else None
