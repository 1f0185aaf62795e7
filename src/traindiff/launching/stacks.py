"""Stacks as `faulthandler` writes them."""

from __future__ import annotations

_OUR_OWN = "_end_with_the_launcher"
"""A thread in which this is called belongs to the launcher."""

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")


def stacks_in(text: str) -> str:
    """The stacks of a rank's threads, without the thread that belongs to the launcher."""
    return "\n\n".join(stack for stack in text.strip().split("\n\n") if _OUR_OWN not in stack)


def is_in_a_collective(stacks: str) -> bool:
    """Whether the thread that was interrupted, which trains, waits for other ranks."""
    _, found, stack = stacks.partition("Current thread")
    first = stack.splitlines()[1:2]
    return bool(found and first) and any(file in first[0] for file in _COLLECTIVES)
