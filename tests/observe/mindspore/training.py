"""The training under MindSpore, in each way in which MindSpore lets one train."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.experimental import optim as experimental
from mindspore.mint import optim as mint

from tests.observe.mindspore.drawn import CLASSES, FEATURES, HIDDEN, batches, weights

MINDSPORES = {"norm.weight": "norm.gamma", "norm.bias": "norm.beta"}
RENAME = {r"\.gamma$": ".weight", r"\.beta$": ".bias"}

WAYS = ("functions", "jit", "model")
"""Calls of functions and cells, a step decorated with `mindspore.jit`, `Model.train`."""

NOT_OF_MODELS = ("experimental-adamw", "mint-adam", "mint-sgd")
"""Optimizers that `Model` refuses."""

MODES = {"pynative": mindspore.PYNATIVE_MODE, "graph": mindspore.GRAPH_MODE}

OPTIMIZERS: dict[str, Callable[[Any], nn.Cell]] = {
    "momentum": lambda parameters: nn.Momentum(parameters, 0.05, 0.9),
    "adam": lambda parameters: nn.Adam(parameters, 0.01, beta2=1 - 2**-10, eps=1e-30),
    "adam-defaults": lambda parameters: nn.Adam(parameters, 0.01),
    "adam-weight-decay": lambda parameters: nn.AdamWeightDecay(parameters, 0.01, weight_decay=0.1),
    "experimental-adamw": lambda parameters: experimental.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "mint-adam": lambda parameters: mint.Adam(parameters, lr=0.01),
    "mint-sgd": lambda parameters: mint.SGD(parameters, lr=0.05, momentum=0.9),
    "scheduled": lambda parameters: nn.Momentum(parameters, [0.05, 0.04, 0.03, 0.02], 0.9),
    "groups": lambda parameters: nn.Adam(
        [{"params": parameters[:2], "lr": 0.02}, {"params": parameters[2:], "weight_decay": 0.1}], 0.01
    ),
}


class Transposed(nn.Cell):
    """A layer whose weight is (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = Parameter(np.zeros((inputs, outputs), dtype=np.float32), name="weight")
        self.bias = Parameter(np.zeros(outputs, dtype=np.float32), name="bias")

    def construct(self, inputs: Tensor) -> Tensor:
        return ops.matmul(inputs, self.weight) + self.bias


class Perceptron(nn.Cell):
    """See `torch_training.Perceptron`."""

    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.first = nn.Dense(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm((HIDDEN,), epsilon=1e-5)
        self.act = nn.ReLU()
        self.last = (Transposed if transposed else nn.Dense)(HIDDEN, CLASSES)

    def construct(self, inputs: Tensor) -> Tensor:
        return self.last(self.act(self.norm(self.first(inputs))))


class Training:
    """One training of the perceptron.

    Args:
        mode: One of `MODES`.
        optimizer: One of `OPTIMIZERS`.
        transposed: Hold the last weight as (inputs, outputs).
    """

    def __init__(self, mode: str, optimizer: str, *, transposed: bool = False) -> None:
        mindspore.set_context(mode=MODES[mode])
        self.net = Perceptron(transposed=transposed)
        self.load()
        self.optimizer = OPTIMIZERS[optimizer](self.net.trainable_params())
        self.criterion = nn.CrossEntropyLoss()
        self._gradients = mindspore.value_and_grad(self.forward, None, self.optimizer.parameters)
        self._model: mindspore.Model | None = None
        self._compiled = mindspore.jit(self.step)

    def load(self) -> None:
        """Give it the initial weights."""
        named = dict(self.net.parameters_and_names())
        for name, value in weights().items():
            parameter = named[MINDSPORES.get(name, name)]
            parameter.set_data(Tensor(value if parameter.shape == value.shape else value.T))

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        return self.criterion(self.net(inputs), labels)

    def step(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """Take one step."""
        loss, gradients = self._gradients(inputs, labels)
        self.optimizer(gradients)
        return loss

    def run(self, way: str, log: Callable[[str, Any], None] | None = None) -> None:
        """Train on all batches, in one of `WAYS`; losses are logged where they are at hand."""
        if way == "model":
            data = GeneratorDataset(batches(), ["inputs", "labels"], shuffle=False)
            if self._model is None:  # it compiles once
                self._model = mindspore.Model(self.net, self.criterion, self.optimizer)
            self._model.train(1, data, dataset_sink_mode=False)
            return
        step = self._compiled if way == "jit" else self.step
        for inputs, labels in batches():
            loss = step(Tensor(inputs), Tensor(labels))
            if log is not None:
                log("loss", loss)

    def bits(self) -> str:
        """A digest of all parameters and all state of the optimizer."""
        digest = hashlib.sha256()
        for _, parameter in sorted(self.optimizer.parameters_and_names()):
            digest.update(np.ascontiguousarray(parameter.asnumpy()).tobytes())
        return digest.hexdigest()
