"""Every private torch API that traindiff uses, each with the reason."""

from __future__ import annotations

import torch


def inside_backward() -> bool:
    """Whether the autograd engine is running on this thread.

    There is no public way to ask; torch's own checkpointing and FSDP ask the same function.
    """
    return torch._C._current_graph_task_id() != -1
