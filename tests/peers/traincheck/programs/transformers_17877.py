"""transformers #17877: GPT-2 initializes the same parameters again and again.

Each module initializes the projections of all modules in it, so those are drawn once per module around them. Slow, and
no number of the training is wrong: another draw of the same distribution.
"""

from __future__ import annotations

from functools import partial
from math import sqrt

import torch
from torch import nn
from torch.nn import functional

from tests.peers.traincheck.programs.baichuan2_86 import SpreadModel
from tests.peers.traincheck.programs.tasks import Record, sentences

STD = 0.02


def initialize(module: nn.Module, *, faulty: bool) -> None:
    """Initialize one module; the faulty function also those inside it."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=STD)
    for name, parameter in module.named_parameters(recurse=faulty):
        if name.endswith(("out.weight", "down.weight")):
            nn.init.normal_(parameter, std=STD / sqrt(4.0))


def train(record: Record, *, faulty: bool) -> None:
    """Train a small language model."""
    torch.manual_seed(0)
    model = SpreadModel()
    model.apply(partial(initialize, faulty=faulty))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with record(model, optimizer):
        for step in range(12):
            tokens = sentences(step, length=17)
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
