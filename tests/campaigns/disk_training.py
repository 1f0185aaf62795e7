"""A training whose disk fails: `python -m tests.campaigns.disk_training PATH AT ACTION...`.

It is not recorded where PATH is empty. Before step AT it does what ACTION says: `fail KINDS ERRNO SECONDS` (see
`failing_disk.c`) or `shell COMMAND`. It prints a hash of its losses and parameters, and how long its slowest step and
its end took.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import sys
import time
from contextlib import nullcontext

import torch

import traindiff

STEPS = 12


def main(path: str, at: int, action: list[str]) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    seen = hashlib.sha256()
    slowest = 0.0
    with traindiff.record(path, model, optimizer) if path else nullcontext():
        for step in range(STEPS):
            if step == at:
                _act(action)
            began = time.monotonic()
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            slowest = max(slowest, time.monotonic() - began)
            seen.update(loss.detach().numpy().tobytes())
        for parameter in model.parameters():
            seen.update(parameter.detach().numpy().tobytes())
        began = time.monotonic()
    print(seen.hexdigest(), f"{slowest:.2f}", f"{time.monotonic() - began:.2f}", flush=True)
    sys.exit(3)  # any status of its own


def _act(action: list[str]) -> None:
    if action[:1] == ["fail"]:
        kinds, error, seconds = action[1:]
        ctypes.CDLL(None).fail_from_now(int(kinds), int(error), ctypes.c_double(float(seconds)))
    elif action:
        subprocess.run(["sh", "-c", *action[1:]], check=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
