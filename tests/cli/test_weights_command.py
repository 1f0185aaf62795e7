"""`traindiff weights` as users call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner, Result

from tests.state.models import bfloat16, hugging_face, megatron
from traindiff.cli.commands import app

STATE = hugging_face()


def weights(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["weights", *arguments], catch_exceptions=False)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a model, the same in bfloat16, and one with a fault."""
    monkeypatch.chdir(tmp_path)
    save_file(STATE, "a.safetensors")
    torch.save({"model": bfloat16(STATE)}, "short.pt")
    save_file(
        STATE | {"model.layers.0.mlp.up_proj.weight": 2 * STATE["model.layers.0.mlp.up_proj.weight"]}, "b.safetensors"
    )
    save_file({name: value.contiguous() for name, value in megatron(STATE).items()}, "fused.safetensors")
    return tmp_path


@pytest.mark.usefixtures("here")
def test_the_exit_code_is_the_verdict() -> None:
    same, fault = weights("a.safetensors", "short.pt"), weights("a.safetensors", "b.safetensors")

    assert (same.exit_code, fault.exit_code, weights("a.safetensors", "nothing").exit_code) == (0, 1, 2)
    assert same.stdout.startswith("equivalent: 30 tensors, the same numbers after rounding\n")
    assert "model.layers.0.mlp.up_proj.weight\n    is the baseline's times 2\n" in fault.stdout
    assert (same.stderr, fault.stderr) == ("", "")


def test_a_map_is_proposed_and_used(here: Path) -> None:
    proposed = weights("a.safetensors", "fused.safetensors", "--propose", "map.toml")

    assert proposed.exit_code == 0
    assert proposed.stderr == "traindiff: wrote 9 entries to map.toml\n"
    assert "model.layers.{n}.self_attn.q_proj.weight" in (here / "map.toml").read_text()
    assert weights("a.safetensors", "fused.safetensors", "--map", "map.toml").stdout.startswith("identical: 21 tensors")


def test_a_proposed_map_that_cannot_be_written_is_refused_before_anything_is_read(here: Path) -> None:
    before = (here / "a.safetensors").read_bytes()
    (here / "damaged.safetensors").write_bytes(b"no weights")
    for path, reason in (("nowhere/map.toml", "cannot be written"), ("a.safetensors", "is what is compared.")):
        refused = weights("a.safetensors", "damaged.safetensors", "--propose", path)

        assert (refused.exit_code, refused.stdout) == (2, "")
        assert f"nothing was read.\n\n  --propose {path}\n    {reason}" in refused.stderr
    assert (here / "a.safetensors").read_bytes() == before


def test_an_accepted_difference_exits_with_zero(here: Path) -> None:
    (here / "accept.toml").write_text('[[accept]]\nname = "*.mlp.up_proj.weight"\nreason = "rescaled on purpose"\n')
    result = weights("a.safetensors", "b.safetensors", "--accept", "accept.toml")

    assert result.exit_code == 0
    assert "(accepted: rescaled on purpose)" in result.stdout


@pytest.mark.usefixtures("here")
def test_top_limits_the_lines_and_says_how_many_more_there_are() -> None:
    result = weights("a.safetensors", "fused.safetensors", "--top", "1")

    assert "... and 3 more tensors (--top, --json)" in result.stdout


def test_numbers_whose_squares_overflow_have_a_difference_in_the_json(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"weight": torch.randn(8, 8).double() * 1e200}, tmp_path / f"{name}.safetensors")
    result = weights(str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--json")

    (relation,) = json.loads(result.stdout)["relations"]
    assert result.exit_code == 1
    assert 0.1 < relation["evidence"]["relative"] < 10.0
