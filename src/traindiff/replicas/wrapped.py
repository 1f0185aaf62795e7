"""Models whose parameters cannot be converted in place."""

from __future__ import annotations

from torch import nn

from traindiff.errors import ConfigError, Problem
from traindiff.replica_setting import ReplicaSetting

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
