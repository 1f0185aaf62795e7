"""One rank of a data-parallel training: `msrun ... ranks_training.py MODE RECORDING`, or alone with the whole batch."""

from __future__ import annotations

import sys
from typing import Any

import mindspore
from mindspore import Tensor, communication, nn

from tests.observe.mindspore.drawn import batches
from tests.observe.mindspore.training import Training
from traindiff.mindspore import record


def main(mode: str, path: str, ranks: str) -> None:
    """Train and record."""
    rank, size = 0, 1
    if ranks != "alone":
        communication.init()
        rank, size = communication.get_rank(), communication.get_group_size()
        mindspore.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=size)
    training = Training(mode, "momentum")
    gradients = mindspore.value_and_grad(training.forward, None, training.optimizer.parameters)
    optimizer = training.optimizer
    reduced = nn.DistributedGradReducer(optimizer.parameters, mean=True, degree=size) if size > 1 else tuple

    def step(inputs: Tensor, labels: Tensor) -> Any:
        loss, found = gradients(inputs, labels)
        optimizer(reduced(found))
        return loss

    call = mindspore.jit(step) if mode == "graph" else step
    chosen = 1 if ranks == "second" else None
    with record(path, training.net, optimizer, ranks=chosen, detail="signs", strict=True) as run:
        for inputs, labels in batches():
            own = slice(rank * len(inputs) // size, (rank + 1) * len(inputs) // size)
            run.log("loss", call(Tensor(inputs[own]), Tensor(labels[own])))


if __name__ == "__main__":
    main(*sys.argv[1:])
