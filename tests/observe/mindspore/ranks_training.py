"""One rank of a data-parallel training: `msrun ... ranks_training.py MODE RECORDING`, or alone with the whole batch."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
from mindspore import Tensor, communication, nn

from tests.observe.mindspore.drawn import batches
from tests.observe.mindspore.training import Training
from traindiff.compat.msprobe import PrecisionDebugger
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
    with observed(path, training, ranks) as log:
        for inputs, labels in batches():
            own = slice(rank * len(inputs) // size, (rank + 1) * len(inputs) // size)
            log("loss", call(Tensor(inputs[own]), Tensor(labels[own])))


@contextmanager
def observed(path: str, training: Training, ranks: str) -> Iterator[Callable[[str, Any], None]]:
    """Record the training, or write the files of the gradient monitor; gives what losses are logged with."""
    chosen = 1 if ranks.endswith("second") else None
    if not ranks.startswith("monitored"):
        with record(path, training.net, training.optimizer, ranks=chosen, detail="signs", strict=True) as run:
            yield run.log
        return
    content = {"task": "grad_probe", "dump_path": path, "rank": [] if chosen is None else [chosen]}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        debugger = PrecisionDebugger(file.name)
    debugger.monitor(training.optimizer)
    yield lambda *_: None
    debugger.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
