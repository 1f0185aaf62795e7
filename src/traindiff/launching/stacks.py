"""Stacks as `faulthandler` writes them."""

from __future__ import annotations

_OUR_OWN = ("_end_with_the_launcher", "traindiff/sessions/background.py")
"""Threads in which these are called only wait, for the launcher and for what is to be written."""

_INTERRUPTED = "Current thread"

_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")


def stacks_in(text: str) -> str:
    """The stacks of a rank's threads, that of the training first, without threads of our own."""
    stacks = [one for one in text.strip().split("\n\n") if not any(ours in one for ours in _OUR_OWN)]
    return "\n\n".join(sorted(stacks, key=lambda one: not one.startswith(_INTERRUPTED)))


def is_in_a_collective(stacks: str) -> bool:
    """Whether the thread that was interrupted, which trains, waits for other ranks."""
    if not stacks.startswith(_INTERRUPTED):
        return False
    innermost = stacks.splitlines()[1:2]
    return any(file in call for call in innermost for file in _COLLECTIVES)
