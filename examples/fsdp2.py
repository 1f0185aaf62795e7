"""A small language model, trained with FSDP2 on several ranks, and on one process as the reference.

    python examples/fsdp2.py runs/one
    torchrun --nproc-per-node 2 examples/fsdp2.py runs/fsdp2
    traindiff compare runs/one runs/fsdp2

`--fault` sums the gradients over ranks where they should be averaged.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import traindiff

VOCABULARY, WIDTH, LENGTH, BATCH, STEPS = 97, 64, 32, 8, 5


class Block(nn.Module):
    """Attention and a perceptron, each beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, WIDTH] -> the same shape."""
        heads = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, dim=-1))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """[batch, length] of tokens -> [batch, length, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        return self.head(self.blocks(self.embed(tokens)))


def main() -> None:
    """Train and record; on several ranks if torchrun has started them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", help="directory to write")
    parser.add_argument("--fault", action="store_true", help="sum gradients over ranks instead of averaging them")
    options = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)  # every rank makes the same model
    model = Model()
    if world_size > 1:
        distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (world_size,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1)

    # On every rank, with the same path. Each rank records what it holds; nothing is gathered.
    with traindiff.record(options.recording, model, optimizer, overwrite=True) as run:
        for _ in range(STEPS):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=batches)
            mine = tokens.chunk(world_size)[rank]  # rank 0 has the first samples of the global batch
            loss = functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
            loss.backward()
            if options.fault:
                for parameter in model.parameters():
                    parameter.grad *= world_size
            run.log("loss", loss)
            optimizer.step()
            optimizer.zero_grad()
    if world_size > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
