"""Every source is read from a store as from a local directory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import traindiff
from tests.state import test_megatron, test_model_parallel_zero, test_zero
from tests.storage.s3_server import BUCKET, s3_server
from traindiff.errors import CheckpointError

STATE = {"weight": torch.randn(30, 4), "bias": torch.arange(3.0)}


def safetensors(here: Path) -> None:
    save_file(STATE, here / "model.safetensors")


def torch_file(here: Path) -> None:
    torch.save(STATE, here / "pytorch_model.bin")


def distributed(here: Path) -> None:
    dcp.save({"model": STATE}, checkpoint_id=here, no_dist=True)


def zero(here: Path) -> None:
    test_zero.save(here, stage=3, ranks=2)


def sharded(here: Path) -> None:
    for name in STATE:
        save_file({name: STATE[name]}, here / f"{name}.safetensors")
    weight_map = {name: f"{name}.safetensors" for name in STATE}
    (here / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"state": {0: {"exp_avg": torch.ones(30, 4)}}}, here / "optimizer.pt")


def old_torch_file(here: Path) -> None:
    torch.save(STATE, here / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def model_parallel(here: Path) -> None:
    rows = [{"q_proj.weight": part} for part in STATE["weight"].chunk(2)]
    test_model_parallel_zero.save(here, [(one, one) for one in rows], stage=3)


def recording(here: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with traindiff.record(here / "run", model, optimizer):
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()
    for file in (here / "run").iterdir():
        file.rename(here / file.name)
    (here / "run").rmdir()


def megatron(here: Path) -> None:
    test_megatron.save(here / "iter_0000003", test_megatron.whole_model(), tensor=2, pipeline=3)
    (here / "latest_checkpointed_iteration.txt").write_text("3")


SOURCES = (
    safetensors, sharded, torch_file, old_torch_file, distributed, zero, model_parallel, megatron, recording,
)  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", SOURCES)
def test_a_store_holds_what_the_local_directory_holds(tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path)
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/", f"/{save.__name__}/", recursive=True)

    found = traindiff.weights(tmp_path, f"memory://{save.__name__}")

    assert found.verdict == "identical"
    assert found.relations


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", SOURCES)
def test_a_bucket_holds_what_the_local_directory_holds(
    tmp_path: Path, save: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    with s3_server(monkeypatch):
        fsspec.filesystem("s3").put(f"{tmp_path}/", f"{BUCKET}/{save.__name__}/", recursive=True)

        found = traindiff.weights(tmp_path, f"s3://{BUCKET}/{save.__name__}")

    assert found.verdict == "identical"
    assert found.relations


def test_what_is_not_in_the_store_is_named() -> None:
    with pytest.raises(CheckpointError, match="memory://nothing does not exist"):
        traindiff.weights("memory://nothing", STATE)
