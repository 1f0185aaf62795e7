"""Make the replica that a setting asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from traindiff.core.setting_checks import ReplicaSetting
from traindiff.errors import ConfigError, Problem
from traindiff.observe.torch.perturb.precision import PrecisionReplica
from traindiff.observe.torch.perturb.reorder import ReorderReplica
from traindiff.observe.torch.perturb.replica import Replica, refuse_compiled
from traindiff.observe.torch.perturb.ulp import UlpReplica

_KEEPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"})


def refuse_wrapped(setting: ReplicaSetting, root: nn.Module) -> None:
    """Refuse a model in a wrapper that keeps buffers for gradients, or parameters, in their dtype.

    Raises:
        ConfigError: Names the wrapper.
    """
    names = {type(module).__name__ for module in root.modules()}
    found = sorted(names & _KEEPERS | {name for name in names if name.startswith("FSDP")})
    if not found:
        return
    problem = Problem(
        where=f'record(replica="{setting}")',
        what=f"converts parameters in place, which {found[0]} does not allow.",
        fix='Record this replica without the wrapper, or write replica="ulp:1".',
    )
    raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")


def make_replica(setting: ReplicaSetting, root: nn.Module, names: Mapping[int, str]) -> Replica:
    """What perturbs the training of `root` as the setting says; nothing is attached yet.

    Args:
        setting: The kind of replica, and its seed.
        root: The module that the training loop calls.
        names: Canonical path of every parameter of it by id.

    Raises:
        ConfigError: This training cannot be perturbed so.
    """
    refuse_compiled(setting, root)
    if setting.kind == "reorder":
        return ReorderReplica(setting.seed)
    if setting.kind == "float64":
        refuse_wrapped(setting, root)
        return PrecisionReplica(torch.float64, root)
    return UlpReplica(setting.seed, root, names)
