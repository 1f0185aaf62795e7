"""The first recipe of docs/verify.md, copied: it runs in plain PyTorch and under engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import traindiff
from tests.observe.sharding.deepspeed_training import NEEDS_DEEPSPEED
from traindiff.run.config.setup import Setup
from traindiff.run.demo import recipes

PAGE = Path(__file__).parents[3] / "docs" / "verify.md"
FEW = {"steps": 2, "repeat": False, "replicas": ("ulp:1", "ulp:2"), "pin": "never"}


@pytest.fixture
def copied(tmp_path: Path) -> str:
    """The recipe in a file of its own, by name."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert code is not None
    (tmp_path / "train.py").write_text(code[1])
    return f"{tmp_path / 'train.py'}:mlp"


@pytest.mark.parametrize(
    "setup",
    [
        Setup(engine="ddp", nproc=2),
        Setup(engine="fsdp2", nproc=2, dtype="bfloat16"),
        pytest.param(Setup(engine="deepspeed", nproc=2, zero_stage=2), marks=NEEDS_DEEPSPEED),
        pytest.param(Setup(engine="deepspeed", nproc=2, zero_stage=3, dtype="bfloat16"), marks=NEEDS_DEEPSPEED),
    ],
    ids=lambda setup: setup.message,
)
def test_the_first_recipe_runs_under_an_engine_as_it_stands(copied: str, setup: Setup, tmp_path: Path) -> None:
    found = traindiff.verify(copied, None, tmp_path / "runs", setup=setup, **FEW)

    assert found.verdict == "equivalent", str(found)


def test_the_built_in_recipe_of_that_name_is_the_same_training(copied: str, tmp_path: Path) -> None:
    found = traindiff.verify(copied, f"{recipes.__name__}:mlp", tmp_path / "runs", **FEW)

    assert found.verdict == "identical", str(found)
