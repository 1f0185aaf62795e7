"""transformers #23723: after a long prompt, generation writes more tokens than it was asked for.

The limit is computed from the prompt as it was given, and the prompt is cut to the context afterwards. What the model
computes is right; the loop around it stops too late.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.peers.traincheck.programs.baichuan2_86 import SpreadModel
from tests.peers.traincheck.programs.tasks import Record, sentences

SETTINGS = {"evaluation": True}

CONTEXT = 16


def generate(model: SpreadModel, prompt: Tensor, *, most: int, faulty: bool) -> Tensor:
    """Continue a prompt by at most so many tokens; the faulty function counts those of the uncut prompt."""
    cut = prompt[:, -CONTEXT // 2 :]
    limit = most + (prompt if faulty else cut).shape[1]
    with torch.no_grad():
        while cut.shape[1] < limit:
            cut = torch.cat([cut, model(cut[:, -CONTEXT:])[:, -1:].argmax(dim=-1)], dim=1)
    return cut


def train(record: Record, *, faulty: bool) -> None:
    """Train a small language model, and let it write after each step."""
    torch.manual_seed(0)
    model = SpreadModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with record(model, optimizer, **SETTINGS):
        for step in range(6):
            tokens = sentences(step, length=17)
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
            generate(model, sentences(1000 + step, length=12), most=4, faulty=faulty)
