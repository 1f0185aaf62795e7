"""Perturb a training within rounding, on purpose and reproducibly; the resulting differences are noise."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from traindiff.core.setting_checks import ReplicaSetting
from traindiff.core.torch_compat.training import modules_in
from traindiff.errors import ConfigError, Problem
from traindiff.observe.torch.perturb.channel import ChannelReplica
from traindiff.observe.torch.perturb.precision import PrecisionReplica
from traindiff.observe.torch.perturb.reorder import ReorderReplica
from traindiff.observe.torch.perturb.replica import Replica, compiled_parts
from traindiff.observe.torch.perturb.ulp import UlpReplica

_KEEPERS = frozenset({"DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"})
"""Wrappers that keep parameters, or buffers for gradients, in their dtype."""


def make_replica(setting: ReplicaSetting, root: nn.Module, names: Mapping[int, str]) -> Replica:
    """The perturbation that a setting asks for; nothing is attached yet.

    Args:
        setting: The kind of replica, and its seed.
        root: The module that the training loop calls.
        names: Canonical path of every parameter of it by id.

    Raises:
        ConfigError: The model is compiled, or has a wrapper that does not allow this replica.
    """
    if compiled := compiled_parts(root):
        raise _refused(
            setting,
            what=f"cannot perturb compiled code, and the model has some: {compiled}.",
            fix="Record the replica of the same training without torch.compile; what it measures holds for both.",
        )
    if setting.kind == "reorder":
        return ReorderReplica(setting.seed)
    if setting.kind == "channel":
        return ChannelReplica(setting.seed)
    if setting.kind == "ulp":
        return UlpReplica(setting.seed, root, names)
    wrappers = {type(module).__name__ for module in modules_in(root)}
    if keepers := sorted(name for name in wrappers if name in _KEEPERS or name.startswith("FSDP")):
        raise _refused(
            setting,
            what=f"converts parameters in place, which {keepers[0]} does not allow.",
            fix='Record this replica without the wrapper, or write replica="ulp:1".',
        )
    return PrecisionReplica(torch.float64, root)


def _refused(setting: ReplicaSetting, *, what: str, fix: str) -> ConfigError:
    problem = Problem(where=f'record(replica="{setting}")', what=what, fix=fix)
    return ConfigError("record(...)", [problem], consequence="nothing was attached to the model")
