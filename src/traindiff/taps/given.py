"""Tell what a training is given from what it has computed, where its loop calls several modules."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from traindiff.taps.progress import Progress


def given_to_training(inputs: Sequence[tuple[str, Tensor]], progress: Progress, *, several: bool) -> list[str]:
    """Slots of the inputs of a module that are part of the batch.

    Where the loop calls one module only, every input of it is. Otherwise what has a graph was computed, and so may
    any floating-point tensor be that comes after another module was called, since the last backward pass: the images
    of a generator that its discriminator is given. The batch must be the same in two runs to the bit; what was
    computed need not.

    Args:
        inputs: By slot.
        progress: Where the training is, before the call that takes them is counted.
        several: Whether its loop calls several modules.
    """
    if not several:
        return [slot for slot, _ in inputs]
    follows_another = progress.forward_done and not progress.backward_done
    return [
        slot
        for slot, tensor in inputs
        if tensor.grad_fn is None and not (follows_another and tensor.is_floating_point())
    ]
