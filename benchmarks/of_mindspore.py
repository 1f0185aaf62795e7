"""What recording a MindSpore training costs: `.venv-mindspore/bin/python benchmarks/of_mindspore.py`.

A perceptron of six layers with Adam, 12.6 million parameters. Observed and plain steps take turns in one process, in
CPU time of all threads, which counts summaries and the thread that writes. Prints a table.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn

from traindiff.mindspore import record
from traindiff.run.doctor.timing import interleaved

WIDTH, LAYERS, BATCH = 1448, 6, 64
WHAT: dict[str, dict[str, Any]] = {
    "all that is seen": {},
    "gradients": {"observe": "grad"},
    "gradients with signs": {"observe": "grad", "detail": "signs"},
}


class Training:
    """The perceptron and its step, called by Python or compiled."""

    def __init__(self, *, compiled: bool) -> None:
        mindspore.set_context(mode=mindspore.GRAPH_MODE if compiled else mindspore.PYNATIVE_MODE)
        cells = [cell for _ in range(LAYERS) for cell in (nn.Dense(WIDTH, WIDTH), nn.ReLU())]
        self.net = nn.SequentialCell(*cells)
        self.optimizer = nn.Adam(self.net.trainable_params(), 1e-4)
        self._gradients = mindspore.value_and_grad(self._loss, None, self.optimizer.parameters)
        self._call = mindspore.jit(self._step) if compiled else self._step
        self._inputs = Tensor(np.random.default_rng(0).standard_normal((BATCH, WIDTH)).astype(np.float32))

    def _loss(self, inputs: Tensor) -> Tensor:
        return self.net(inputs).square().mean()

    def _step(self, inputs: Tensor) -> Tensor:
        loss, gradients = self._gradients(inputs)
        self.optimizer(gradients)
        return loss

    def step(self) -> None:
        """One step, to its end."""
        self._call(self._inputs).asnumpy()
        self.optimizer.parameters[-1].asnumpy()


def measured(what: dict[str, Any], *, compiled: bool, rounds: int, clock: Callable[[], float]) -> Any:
    """Ratio of an observed step to a plain one."""
    plain, observed = Training(compiled=compiled), Training(compiled=compiled)
    with (
        tempfile.TemporaryDirectory() as name,
        record(Path(name) / "run", observed.net, observed.optimizer, strict=True, **what),
    ):
        for _ in range(2):
            plain.step()
            observed.step()
        return interleaved(plain.step, observed.step, rounds=rounds, clock=clock)


def main() -> None:
    """Measure and print."""
    from time import process_time

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print("| what | mode | step time / plain | quartiles | plain step |")
    print("| --- | --- | --- | --- | --- |")
    for compiled in (False, True):
        for name, what in WHAT.items():
            ratio = measured(what, compiled=compiled, rounds=rounds, clock=process_time)
            print(
                f"| {name} | {'graph' if compiled else 'PyNative'} | **{ratio.median:.2f}** | {ratio.low:.2f} - "
                f"{ratio.high:.2f} | {ratio.baseline_seconds:.2f} s |",
                flush=True,
            )


if __name__ == "__main__":
    main()
