"""A small classifier, and the mistakes that docs/symptoms/ shows: `python examples/symptoms/train.py [MISTAKE ...]`.

Under torchrun, it trains with DistributedDataParallel. Each mistake is one line that somebody once wrote.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

STEPS, BATCH, INPUTS, WIDTH, CLASSES = 24, 32, 16, 64, 4


class Block(nn.Module):
    """A perceptron beside a residual connection."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, eps=eps)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, WIDTH] -> the same shape."""
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """[batch, INPUTS] -> [batch, CLASSES]."""

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.Sequential(Block(eps), Block(eps))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the classes."""
        return self.head(self.blocks(self.embed(x)))


def batches(mistakes: set[str], rank: int, ranks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of one rank: its share of each, or all of it if somebody forgot the sampler."""
    generator = torch.Generator().manual_seed(1)
    rule = torch.randn(INPUTS, CLASSES, generator=generator)
    for step in range(STEPS):
        inputs = torch.randn(BATCH, INPUTS, generator=generator)
        labels = (inputs @ rule).argmax(dim=-1)
        if "bad-batch" in mistakes and step == 20:
            inputs = 1000 * inputs
        share = slice(None) if "no-sampler" in mistakes else slice(rank, None, ranks)
        yield inputs[share], labels[share]


def approximated(module: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
    """A compiler's pass that takes a faster GELU."""
    for node in module.graph.nodes:
        if node.target is functional.gelu:
            node.kwargs = {"approximate": "tanh"}
    module.recompile()
    return module


class MyAdam(torch.optim.Optimizer):
    """Adam, written anew, without the correction of the first steps."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Change the parameters by Adam's formula."""
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
                state["exp_avg"].lerp_(parameter.grad, 0.1)
                state["exp_avg_sq"].lerp_(parameter.grad**2, 0.001)
                parameter.sub_(group["lr"] * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8))


def main(mistakes: set[str]) -> None:
    """Train for two dozen steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        distributed.init_process_group("gloo")
    rank = distributed.get_rank() if ranks > 1 else 0

    model = Model(eps=1e-3 if "eps" in mistakes else 1e-5)
    if "bf16" in mistakes:
        model = model.bfloat16()
    optimizer = (MyAdam if "my-adam" in mistakes else torch.optim.Adam)(model.parameters(), lr=1e-4)
    net: nn.Module = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    if "compile" in mistakes:
        net = torch.compile(model, backend=approximated)
    for step, (inputs, labels) in enumerate(batches(mistakes, rank, ranks)):
        backward(net, inputs.bfloat16() if "bf16" in mistakes else inputs, labels, mistakes, step)
        if "late-zero" in mistakes:
            optimizer.zero_grad()
        if "broken-rank" in mistakes and rank == 1 and step == 3:
            model.blocks[1].up.weight.grad[5, 7] += 0.01
        if "bit-flip" in mistakes and step == 4:
            model.blocks[1].up.weight.grad.numpy().view("int32")[5, 7] ^= 1 << 28
        optimizer.step()
        optimizer.zero_grad()
    if ranks > 1:
        distributed.destroy_process_group()


def backward(net: nn.Module, inputs: Tensor, labels: Tensor, mistakes: set[str], step: int) -> None:
    """The gradients of one batch, in one part or in four."""
    parts = 4 if mistakes & {"accumulate", "accumulate-unscaled"} else 1
    for some, right in zip(inputs.chunk(parts), labels.chunk(parts), strict=True):
        outputs = net(some)
        if "log" in mistakes and step == 7:
            outputs = (outputs - outputs.amax(dim=-1, keepdim=True)).sqrt()
        loss = functional.cross_entropy(outputs, right)
        (loss if "accumulate-unscaled" in mistakes else loss / parts).backward()


if __name__ == "__main__":
    main(set(sys.argv[1:]))
