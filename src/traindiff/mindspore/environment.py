"""What `run.json` says of the circumstances of a run under MindSpore: versions, machine, flags, source revision."""

from __future__ import annotations

from typing import Any

import mindspore

from traindiff.sessions.machine import circumstances, variables

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
