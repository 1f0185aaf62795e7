"""Which rank this process is."""

from __future__ import annotations

import os

import torch


def rank_and_world_size() -> tuple[int, int]:
    """This process's rank, and how many there are: of the process group, or as the launcher has set them."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
