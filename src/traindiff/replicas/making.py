"""Make the replica that a setting asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from traindiff.replica_setting import ReplicaSetting
from traindiff.replicas.compiled import refuse_compiled
from traindiff.replicas.precision import PrecisionReplica
from traindiff.replicas.reorder import ReorderReplica
from traindiff.replicas.replica import Replica
from traindiff.replicas.ulp import UlpReplica
from traindiff.replicas.wrapped import refuse_wrapped


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
