"""mmpretrain #702: `frozen_stages` has no effect until `train()` is called, and nothing calls it.

The backbone freezes its stages in `train()`, as VGG of that library did, and its `__init__` does not.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, Record, images


class Backbone(nn.Module):
    """Three stages of convolutions, of which the first `frozen_stages` are to stay as they are."""

    def __init__(self, frozen_stages: int) -> None:
        super().__init__()
        self.frozen_stages = frozen_stages
        widths = (3, 8, 16, 16)
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
            for before, after in pairwise(widths)
        )

    def train(self, mode: bool = True) -> Backbone:
        """Set the mode, and freeze stages."""
        super().train(mode)
        for stage in self.stages[: self.frozen_stages]:
            stage.eval()
            for parameter in stage.parameters():
                parameter.requires_grad = False
        return self

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x.mean(dim=(2, 3))


class Classifier(nn.Module):
    """A backbone and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(frozen_stages=2), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits


def train(record: Record, *, faulty: bool) -> None:
    """Fine-tune; the faulty program never calls `train()`."""
    torch.manual_seed(0)
    model = Classifier()
    if not faulty:
        model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    with record(model, optimizer):
        for step in range(12):
            inputs, labels = images(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
