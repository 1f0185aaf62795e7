"""DeepSpeed #5794: ranks of a mixture of experts exchange tokens in buffers of different lengths.

The capacity of the experts follows from the number of tokens, which differs between ranks. The right program agrees on
the largest one. In the issue the collective then never returns; with Gloo, a rank that receives too much aborts.
"""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import VOCABULARY, Record, sentences

RANKS = 2

WIDTH = 16


class _Exchange(torch.autograd.Function):
    """Sends block i to rank i, and so do the gradients."""

    @staticmethod
    def forward(_: object, blocks: Tensor) -> Tensor:
        received = torch.empty_like(blocks)
        distributed.all_to_all_single(received, blocks.contiguous())
        return received

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        received = torch.empty_like(gradient)
        distributed.all_to_all_single(received, gradient.contiguous())
        return received


class Experts(nn.Module):
    """One expert on each rank; a token goes to the one that its gate prefers, if there is room."""

    def __init__(self, *, agrees: bool) -> None:
        super().__init__()
        self.agrees = agrees
        self.gate = nn.Linear(WIDTH, RANKS)
        self.expert = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, choice = self.gate(tokens).softmax(dim=-1).max(dim=-1)
        capacity = torch.tensor(len(tokens))
        if self.agrees:
            distributed.all_reduce(capacity, op=distributed.ReduceOp.MAX)
        blocks = x.new_zeros(RANKS, int(capacity), WIDTH)
        place = torch.stack([(choice == one).cumsum(0) - 1 for one in range(RANKS)], dim=1)
        place = place.gather(1, choice[:, None]).squeeze(1)
        blocks = blocks.index_put((choice, place), tokens)
        returned = _Exchange.apply(self.expert(_Exchange.apply(blocks)))
        return (returned[choice, place] * weights[:, None]).view_as(x)


class Model(nn.Module):
    """A language model with one layer of experts."""

    def __init__(self, *, agrees: bool) -> None:
        super().__init__()
        self.embedding, self.experts = nn.Embedding(VOCABULARY, WIDTH), Experts(agrees=agrees)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        logits: Tensor = self.head(hidden + self.experts(hidden))
        return logits


def train(record: Record, *, faulty: bool) -> None:
    """Train on two ranks, whose sentences are as long as each other until step 4."""
    rank = distributed.get_rank()
    torch.manual_seed(0)
    model = Model(agrees=not faulty)
    shared = [one for name, one in model.named_parameters() if "expert.experts" not in name and ".expert." not in name]
    torch.manual_seed(rank)
    for layer in model.experts.expert:
        if isinstance(layer, nn.Linear):
            layer.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with record(model, optimizer, select=["embedding*", "head*", "experts.gate*", "experts", "", "(root)"]):
        for step in range(8):
            tokens = sentences(2 * step + rank, length=13 - 4 * (rank and step >= 4))
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            for one in shared:
                if one.grad is not None:
                    distributed.all_reduce(one.grad, op=distributed.ReduceOp.AVG)
            optimizer.step()
