"""What a recording says of the circumstances of its run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
import torch

import traindiff
from tests.observe.hooks.models import mlp
from traindiff.observe.torch.session import environment


def test_a_recording_says_how_its_run_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setenv("SECRET_TOKEN", "xyz")
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    traindiff.record(tmp_path / "run", mlp(), every=5).close()

    run = traindiff.open_recording(str(tmp_path / "run")).run

    assert run["command"] == ["train.py", "--lr", "0.1"]
    assert run["versions"]["torch"] == torch.__version__
    assert run["versions"]["traindiff"] == traindiff.__version__
    assert run["environment"]["default_dtype"] == "float32"
    assert run["environment"]["variables"]["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "xyz" not in json.dumps(run)  # only variables that can change numbers
    assert run["settings"]["every"] == 5
    assert datetime.fromisoformat(run["created"]).tzinfo is not None
    assert run["world_size"] == 1


def test_arguments_that_are_no_unicode_are_kept_as_far_as_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", os.fsdecode(b"run-\xff")])

    assert environment.describe()["command"] == ["train.py", "run-\ufffd"]


def test_the_revision_of_the_checkout_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.chdir(tmp_path)
    assert environment.describe()["source"] == {}

    git("init")
    (tmp_path / "train.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    assert environment.describe()["source"] == {"revision": git("rev-parse", "HEAD"), "modified": False}

    (tmp_path / "train.py").write_text("2")
    assert environment.describe()["source"]["modified"] is True


def test_without_git_nothing_is_said_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)

    assert environment.describe()["source"] == {}


def test_the_rank_file_names_what_is_observed(tmp_path: Path) -> None:
    model = torch.nn.Sequential(mlp(), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[1].parameters()}])
    traindiff.record(tmp_path / "run", model, {"adam": optimizer}, select="*").close()

    content = traindiff.open_recording(str(tmp_path / "run")).rank_content(0)

    assert content["model"] == "Sequential"
    assert content["modules"]["0.1"] == "ReLU"
    assert content["parameters"]["1.weight"] == {"shape": [4], "dtype": "float32", "requires_grad": True}
    assert content["buffers"]["1.num_batches_tracked"]["dtype"] == "int64"
    assert content["optimizers"] == [
        {
            "name": "adam", "type": "AdamW",
            "groups": [["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"], ["1.weight", "1.bias"]],
        }
    ]  # fmt: skip
    assert content["pid"] == os.getpid()


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch 2.9 has the new names")
@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("torch.backends.fp32_precision = 'tf32'", ("high", "True", "False")),
        ("torch.backends.cuda.matmul.fp32_precision = 'tf32'", ("high", "True", "False")),
        ("torch.backends.cudnn.conv.fp32_precision = 'tf32'", ("highest", "False", "False")),
        ("torch.backends.mkldnn.matmul.fp32_precision = 'bf16'", ("medium", "False", "False")),
        ("torch.set_float32_matmul_precision('high')", ("high", "True", "False")),
        ("pass", ("highest", "False", "False")),
    ],
)
def test_precision_may_be_set_by_its_new_names(setting: str, said: tuple[str, str, str], tmp_path: Path) -> None:
    """Torch refuses to read the old names then: transformers' `TrainingArguments(tf32=True)` uses the new ones.

    Expected are the precision of products, and whether TF32 is used on a GPU (in place of which the program names the
    model's CPU) in products and, there being no convolution, in cuDNN.
    """
    program = f"""
import torch, traindiff
from traindiff.observe.torch.hooks import surroundings
surroundings._is_on_gpu = lambda module: True
{setting}
model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
observe = "grad", "param", "loss", "forward", "witness"
with traindiff.record({str(tmp_path / "run")!r}, model, optimizer, observe=observe, strict=True):
    for _ in range(2):
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr
    recording = traindiff.open_recording(str(tmp_path / "run"))
    flags = json.loads((tmp_path / "run" / "rank-00000" / "rank.json").read_text())["surroundings"]["torch"]
    assert (flags["float32_matmul_precision"], flags["cuda_matmul_tf32"], flags["cudnn_tf32"]) == said
    assert recording.run["environment"]["float32_matmul_precision"] == said[0]
