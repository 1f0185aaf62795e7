"""Train a small classifier. `--bug` leaves zero_grad out, `--overflow` makes an infinity in step 3."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
from torch import nn

import traindiff


def main(options: list[str]) -> None:
    """Train for eight steps."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    first, second = nn.Linear(16, 64), nn.Linear(64, 64)
    model = nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.watch(model, frames=2) if "--overflow" in options else nullcontext():
        for step in range(8):
            inputs, labels = torch.randn(32, 16), torch.randint(4, (32,))
            if "--overflow" in options and step == 3:
                with torch.no_grad():
                    first.weight.mul_(1e38)
                    second.weight.mul_(1e38)
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            if "--bug" not in options:
                optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}")  # noqa: T201  a script


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except traindiff.NonFiniteError:
        sys.exit(1)  # the watch has said all
