"""Plain tensors of which `traindiff.shard` says what ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

import traindiff
from tests.engines.by_hand import Model, divided
from tests.engines.test_tensor_parallel import assert_equivalent
from tests.engines.transformer import train
from traindiff.sessions.ranks import run_on_ranks


def declared(axis: Any = None) -> Sequence[Any]:
    axis = axis or distributed.group.WORLD
    return [
        traindiff.shard("*.qkv", dim=-1, axis=axis, blocks=3),
        traindiff.shard("*.qkv.*", dim=0, axis=axis, blocks=3),
        traindiff.shard("*.core", dim=2, axis=axis),
        traindiff.shard("*.up", dim=2, axis=axis),
        traindiff.shard("*.act", dim=2, axis=axis),
        traindiff.shard("*.up.*", dim=0, axis=axis),
        traindiff.shard("*.proj", partial=True, axis=axis),
        traindiff.shard("*.down", partial=True, axis=axis),
        traindiff.shard("*.proj.weight", dim=1, axis=axis),
        traindiff.shard("*.down.weight", dim=1, axis=axis),
    ]


def train_one(path: str) -> None:
    train(path, model=Model)


def train_divided(path: str) -> None:
    train(path, divided, model=Model, shards=declared)


def train_undeclared(path: str) -> None:
    train(path, divided, model=Model, shards=lambda: declared()[-3:-2])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "run"
    train_one(str(path))
    return path


def test_a_model_that_is_divided_by_hand_is_equivalent_to_one_process(reference: Path, tmp_path: Path) -> None:
    run_on_ranks(train_divided, 2, str(tmp_path / "run"))

    assert_equivalent(reference, tmp_path / "run")
