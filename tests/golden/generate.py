"""Write the golden recordings that tests read without torch: `python -m tests.golden.generate`.

They are read by every later version, so those of a released version are never written again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional

import traindiff
from traindiff.observe.torch.session import recorder

HERE = Path(__file__).parent / "v1"
CIRCUMSTANCES = {
    "created": "2026-01-01T00:00:00+00:00",
    "command": ["train.py"],
    "versions": {"torch": "2.13.0", "traindiff": "0.1.0"},
    "environment": {"machine": "x86_64", "num_threads": 1},
    "source": {},
}


def train(path: Path, *, wrong_step: int | None) -> None:
    """Three steps of a small classifier; in one of them the gradient of `fc.weight` is doubled."""
    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(6, 8))
    model.add_module("act", nn.Tanh())
    model.add_module("head", nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    shutil.rmtree(path, ignore_errors=True)
    with patch.object(recorder, "describe", lambda: CIRCUMSTANCES), traindiff.record(path, model, optimizer):
        for step in range(3):
            loss = functional.cross_entropy(model(torch.randn(5, 6)), torch.randint(3, (5,)))
            loss.backward()
            if step == wrong_step:
                model.fc.weight.grad *= 2
            optimizer.step()
            optimizer.zero_grad()
    about = path / "rank-00000" / "rank.json"
    content = json.loads(about.read_text())
    content.pop("checksum")
    content["pid"] = 1
    from traindiff.storage import manifest

    about.write_bytes(manifest.dump(content))


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(HERE / "baseline", wrong_step=None)
    train(HERE / "again", wrong_step=None)
    train(HERE / "candidate", wrong_step=1)
