"""A training to be killed: `python -m tests.observe.session.killed_training PATH STEPS`. Says when a step has ended."""

from __future__ import annotations

import sys

import torch

import traindiff


def main(path: str, steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with traindiff.record(path, model, optimizer, strict=True) as run:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(16, 32)).square().mean()
            loss.backward()
            optimizer.step()
            run.log("loss", loss)
            print(step, flush=True)  # noqa: T201  read by the process that kills this one


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
