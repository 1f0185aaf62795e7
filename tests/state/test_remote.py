"""Every source is read from a store as from a local directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import traindiff
from tests.state import test_megatron, test_zero
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


def megatron(here: Path) -> None:
    test_megatron.save(here / "iter_0000003", test_megatron.whole_model(), tensor=2, pipeline=3)
    (here / "latest_checkpointed_iteration.txt").write_text("3")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", [safetensors, torch_file, distributed, zero, megatron])
def test_a_store_holds_what_the_local_directory_holds(tmp_path: Path, save: Callable[[Path], None]) -> None:
    save(tmp_path)
    store = fsspec.filesystem("memory")
    store.put(f"{tmp_path}/", f"/{save.__name__}/", recursive=True)

    found = traindiff.weights(tmp_path, f"memory://{save.__name__}")

    assert found.verdict == "identical"
    assert found.relations


def test_what_is_not_in_the_store_is_named() -> None:
    with pytest.raises(CheckpointError, match="memory://nothing does not exist"):
        traindiff.weights("memory://nothing", STATE)
