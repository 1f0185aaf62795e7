"""A disk that fills up while a training is recorded: the training goes on, bitwise the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import traindiff
from tests.warm_process import warm

TRAINING = """
import resource, signal, sys, warnings
import torch, traindiff

path, limit, strict = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "strict"
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if path:
    run = traindiff.record(path, model, optimizer, strict=strict)
if limit:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing beyond the limit is an OSError then
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for step in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(6, 8)).square().mean()
    loss.backward()
    optimizer.step()
    if path:
        run.log("loss", loss)
    print(loss.item().hex(), flush=True)
if path:
    run.close()
    run.close()
"""


def train(*arguments: object, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return warm(*flags, "-c", TRAINING, *map(str, arguments), timeout=100)


@pytest.fixture(scope="module")
def expected() -> str:
    return train("", 0, "").stdout


@pytest.mark.parametrize("flags", [(), ("-W", "error")], ids=["", "warnings as errors"])
def test_a_full_disk_ends_the_recording_and_not_the_training(
    flags: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    result = train(tmp_path / "run", 120_000, "", flags=flags)

    assert result.returncode == 0, result.stderr
    assert result.stdout == expected
    assert result.stderr.count("could not write the recording, and records nothing more: OSError") == 1
    assert "Traceback" not in result.stderr
    recording = traindiff.open_recording(str(tmp_path / "run"))
    steps = [part.step for part in recording.steps(0)]
    assert steps == list(range(len(steps)))
    assert 1 <= len(steps) < 20
    assert recording.status(0).ending != "closed"


def test_a_full_disk_raises_in_strict_mode(tmp_path: Path) -> None:
    result = train(tmp_path / "run", 120_000, "strict")

    assert result.returncode == 1
    assert "OSError: [Errno 27] File too large" in result.stderr
