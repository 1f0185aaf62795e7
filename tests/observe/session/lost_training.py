"""A training to whose recording something happens: `python -m tests.observe.session.lost_training PATH WHAT`."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Any

import torch

import traindiff
from traindiff.observe.common import writing as background
from traindiff.storage.written_files import WrittenFiles


def _hang(*_: Any) -> None:
    time.sleep(3600)


def main(path: str, what: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if what.startswith("hang"):  # a minute is too long for a test
        background.BackgroundWriter.__init__.__kwdefaults__["patience_seconds"] = 0.5
    run = traindiff.record(path, model, optimizer, strict=what == "strict") if path else None
    for step in range(12):
        if step == 4:
            _act(path, what)
        optimizer.zero_grad()
        loss = model(torch.randn(6, 8)).square().mean()
        loss.backward()
        optimizer.step()
        print(loss.item().hex(), flush=True)  # noqa: T201  compared with that of other runs
    if what == "hang at the end":
        WrittenFiles.append = _hang  # type: ignore[method-assign]
    if run is not None and what != "hang and exit":
        run.close()
    sys.exit(5)


def _act(path: str, what: str) -> None:
    rank = f"{path}/rank-00000"
    if what in ("removed", "strict"):
        shutil.rmtree(path)
    elif what == "moved":
        os.rename(path, f"{path}-moved")  # noqa: PTH104
    elif what == "cut":
        os.truncate(f"{rank}/observations.arrows", 4000)
    elif what in ("hang", "hang and exit"):
        WrittenFiles.append = _hang  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
