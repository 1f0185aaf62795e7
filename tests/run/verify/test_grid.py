"""The grid of `traindiff verify --matrix`: combinations, exclusions, and what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import traindiff
from traindiff.run.config.options import setups
from traindiff.run.verify.matrix import read_grid

GRID = """
[grid]
engine = ["ddp", "deepspeed"]
dtype = ["torch.float32", "bfloat16"]

[settings]
gradient_clipping = 1.0

[[exclude]]
engine = "ddp"
dtype = "bfloat16"
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_every_value_comes_with_every_other_but_for_what_is_excluded(tmp_path: Path) -> None:
    found = read_grid(written(tmp_path / "grid.toml", GRID), {"nproc": 4})

    assert [one.name for one in found] == [
        "engine=ddp, dtype=torch.float32",
        "engine=deepspeed, dtype=torch.float32",
        "engine=deepspeed, dtype=bfloat16",
    ]
    _, setup = setups(found[1].options, world_size=None)
    assert (setup.engine, setup.dtype, setup.gradient_clipping, setup.nproc) == ("deepspeed", "float32", 1.0, 4)


def test_json_says_the_same(tmp_path: Path) -> None:
    content = {"grid": {"zero_stage": [1, 2]}, "settings": {"baseline_engine": "ddp"}}
    found = read_grid(written(tmp_path / "grid.json", json.dumps(content)), {})

    made = [setups(one.options, world_size=None) for one in found]
    assert [(one.engine, one.nproc, one.zero_stage) for _, one in made] == [("deepspeed", 2, 1), ("deepspeed", 2, 2)]
    assert made[0][0].message == "ddp, nproc=2"


def test_all_that_is_wrong_with_a_file_is_said_at_once(tmp_path: Path) -> None:
    text = '[grid]\nengin = ["ddp"]\nnproc = 2\n[setings]\n[[exclude]]\ndtpe = "float32"\n'

    with pytest.raises(traindiff.ConfigError) as caught:
        read_grid(written(tmp_path / "grid.toml", text), {})

    assert [problem.where for problem in caught.value.problems] == [
        "setings", "[grid] engin", "[[exclude]] dtpe", "[grid] nproc",
    ]  # fmt: skip
    assert 'Did you mean "engine"?' in str(caught.value)
    assert "Write [2]." in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("grid.toml", "engine = [", "is no TOML ("),
        ("grid.json", "{", "is no JSON ("),
        ("grid.toml", "[settings]\nnproc = 2\n", "has nothing to vary."),
        ("missing.toml", None, "does not exist."),
    ],
)
def test_a_file_that_is_no_grid_is_refused(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)

    with pytest.raises(traindiff.ConfigError) as caught:
        read_grid(path, {})

    assert message in str(caught.value)


def test_what_was_left_out_follows_from_the_rest() -> None:
    def setup(world_size: int | None = None, **asked: object) -> tuple[str, int]:
        _, found = setups(asked, world_size=world_size)
        return found.engine, found.nproc

    assert setup() == ("plain", 1)
    assert setup(zero_stage=0) == ("deepspeed", 2)
    assert setup(offload_device="cpu") == ("deepspeed", 2)
    assert setup(deepcompile=True) == ("deepspeed", 2)
    assert setup(zero_stage=1, engine="ddp") == ("ddp", 2)  # which is refused, with a reason
    assert setup(engine="tp", nproc=4) == ("tp", 4)
    assert setup(engine="ddp", world_size=8) == ("ddp", 8)
    assert setup(world_size=8) == ("plain", 1)


def test_a_baseline_under_an_engine_has_the_candidates_ranks_dtype_clipping_and_micro_batches() -> None:
    further = {"dtype": "bfloat16", "gradient_clipping": 1.0, "gradient_accumulation_steps": 2, "compile": True}
    found, _ = setups({"zero_stage": 2, "nproc": 4, "baseline_engine": "ddp", **further}, world_size=None)

    assert (
        found.message
        == "ddp, nproc=4, dtype=bfloat16, precision=master, gradient_accumulation_steps=2, gradient_clipping=1.0"
    )
