"""What `run.json` says of the circumstances of a run under MindSpore: versions, machine, flags, source revision."""

from __future__ import annotations

import os
from typing import Any

import mindspore
from mindspore import communication

from traindiff.errors import ConfigError, Problem
from traindiff.observe.common.circumstances import circumstances, variables

ALONE = "by hand"
"""What divides the batch where MindSpore is told nothing of it."""

_WHOLE = ("stand_alone", "data_parallel")
"""Ways to train on several ranks in which each of them holds whole tensors."""


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank, and how many there are: of the communication group, or as the launcher has set them."""
    if communication.GlobalComm.INITED:
        return communication.get_rank(), communication.get_group_size()
    return int(os.environ.get("RANK_ID", "0")), int(os.environ.get("RANK_SIZE", "1"))


def mesh(world_size: int) -> dict[str, Any] | None:
    """How the batch is divided, for `run.json`; None for a single process.

    Raises:
        ConfigError: MindSpore cuts parameters into parts, and tells nobody which.
    """
    if world_size == 1:
        return None
    way = str(mindspore.get_auto_parallel_context("parallel_mode"))
    if way in _WHOLE:
        return {"data_parallel": world_size, "engine": ALONE if way == "stand_alone" else way}
    problem = Problem(
        where=f"record(...) in the parallel mode {way}",
        what="cannot tell which parts of its tensors a rank holds.",
        fix=f"Train in one of: {', '.join(_WHOLE)}.",
    )
    raise ConfigError("record(...)", [problem], consequence="nothing was attached to the model")


GRAPH = "graph"
PYNATIVE = "pynative"

_VARIABLES = ("ASCEND_", "DEVICE_", "GLOG_", "HCCL_", "MS_", "OMP_", "RANK_")
_PACKAGES = ("mindspore", "numpy")


def mode() -> str:
    """`graph` where calls of cells are compiled as a whole, else `pynative`."""
    return GRAPH if mindspore.get_context("mode") == mindspore.GRAPH_MODE else PYNATIVE


def describe() -> dict[str, Any]:
    """Circumstances that can change a run's numbers, as JSON values. Reads, never computes on a device."""
    environment = {
        "framework": "mindspore",
        "mode": mode(),
        "devices": [str(mindspore.get_context("device_target"))],
        "variables": variables(_VARIABLES),
    }
    return circumstances(packages=_PACKAGES, environment=environment)
