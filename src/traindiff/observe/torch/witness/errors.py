"""Why a gradient cannot be checked."""

from __future__ import annotations

KEPT_AWAY = "activation checkpointing, or offloading, kept the input of its layer away"


UNREADABLE = "an operation that uses it has saved tensors that cannot be read, as transforms of torch.func do"

OTHER_PART = "which part of it this rank has is not known"


class NotWitnessedError(Exception):
    """A gradient cannot be checked; the message is the reason."""
