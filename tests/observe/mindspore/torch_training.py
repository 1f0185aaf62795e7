"""The training under PyTorch: `python -m tests.observe.mindspore.torch_training OPTIMIZER RECORDING [WORD...]`."""

from __future__ import annotations

import sys

import torch
from torch import nn

import traindiff
from tests.observe.mindspore.drawn import CLASSES, FEATURES, HIDDEN, batches, weights

OUTSIDE_GRAPHS = ("batch", "forward")
LEARNED = ("grad", "optimizer", "update", "param")


class Perceptron(nn.Module):
    """Two layers, and a norm whose parameters MindSpore calls otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN, eps=1e-5)
        self.act = nn.ReLU()
        self.last = nn.Linear(HIDDEN, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Logits."""
        result: torch.Tensor = self.last(self.act(self.norm(self.first(inputs))))
        return result


def main(optimizer: str, path: str, *how: str) -> None:
    """Train and record."""
    torch.set_num_threads(1)
    model = Perceptron()
    model.load_state_dict({name: torch.from_numpy(value) for name, value in weights().items()})
    parameters = model.parameters()
    made: dict[str, torch.optim.Optimizer] = {
        "momentum": torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        "adam": torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 1 - 2**-10), eps=1e-30),
        "adam-defaults": torch.optim.Adam(model.parameters(), lr=0.01),
    }
    chosen = made[optimizer]
    criterion = nn.CrossEntropyLoss()
    detail = "signs" if "signs" in how else "summary"
    observe = LEARNED if "learned" in how else (*OUTSIDE_GRAPHS, *LEARNED)
    with traindiff.record(path, model, chosen, observe=observe, detail=detail, overwrite=True) as run:
        for inputs, labels in batches():
            loss = criterion(model(torch.from_numpy(inputs)), torch.from_numpy(labels).long())
            chosen.zero_grad()
            loss.backward()
            if "doubled" in how and model.last.weight.grad is not None:
                model.last.weight.grad *= 2
            chosen.step()
            run.log("loss", loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
