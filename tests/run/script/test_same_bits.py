"""A script computes the same bits with and without `traindiff run`, and what it trains is recorded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.run.script.running_scripts import GAN, SCRIPTS, on_two_ranks, plain, recorded, recorded_warm
from traindiff.storage import open_recording


def flat(state: Mapping[str, Any], prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, one in state.items():
        found |= flat(one, f"{prefix}{name}.") if isinstance(one, Mapping) else {f"{prefix}{name}": one}
    return found


def assert_same_bits(baseline: Path, candidate: Path) -> None:
    expected, found = flat(torch.load(baseline)), flat(torch.load(candidate))
    assert expected
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def sites(recording: Path, rank: int = 0) -> set[tuple[str, str, str]]:
    return {
        (one.phase, one.path, one.slot)
        for step in open_recording(str(recording)).steps(rank)
        for one in step.observations
        if not one.unobserved
    }


@pytest.mark.parametrize("script", [SCRIPTS / "mlp.py", GAN, SCRIPTS / "gpt.py"], ids=lambda script: script.stem)
def test_a_script_computes_the_same_bits_and_prints_the_same(tmp_path: Path, script: Path) -> None:
    without = plain(script, tmp_path / "without.pt")
    recording = tmp_path / "recording"
    with_it = recorded(script, tmp_path / "with.pt", output=recording)

    assert (without.code, with_it.code) == (0, 0), with_it.errors
    assert with_it.output == without.output
    assert with_it.errors == without.errors
    assert_same_bits(tmp_path / "without.pt", tmp_path / "with.pt")
    again = recorded_warm(script, tmp_path / "again.pt", output=tmp_path / "again")
    assert again.said[0].startswith("Recorded in ")
    assert traindiff.compare(recording, tmp_path / "again").verdict == "identical"


def test_the_ranks_of_a_script_compute_the_same_bits_and_are_all_recorded(tmp_path: Path) -> None:
    script = SCRIPTS / "ddp.py"
    recording = tmp_path / "recording"
    on_two_ranks(script, tmp_path / "without.pt")
    ended = on_two_ranks("-m", "traindiff", "run", "-o", recording, script, tmp_path / "with.pt")

    assert ended.code == 0, ended.errors
    assert_same_bits(tmp_path / "without.pt", tmp_path / "with.pt")
    assert ended.said == [
        f"Recorded in {recording}: 3 steps of SGD.",
        "Models: Sequential (DistributedDataParallel), 4 parameters.",
    ]
    for rank in (0, 1):
        assert {("forward", "0", "output[0]"), ("grad", "2.weight", "grad")} <= sites(recording, rank)
    assert open_recording(str(recording)).run["mesh"] == {"data_parallel": 2, "engine": "DistributedDataParallel"}
    assert traindiff.check(recording).verdict == "healthy"


def test_models_of_a_gan_are_named_by_the_variables_that_hold_them(tmp_path: Path) -> None:
    ended = recorded_warm(GAN, tmp_path / "weights.pt", output=tmp_path / "recording")

    assert ended.said == [
        f"Recorded in {tmp_path / 'recording'}: 4 steps of Adam (optimizer), 4 steps of Adam (optimizer[1]).",
        "Models: discriminator: Discriminator, 4 parameters; generator: Generator, 4 parameters.",
    ]
    found = sites(tmp_path / "recording")
    assert ("batch", "generator", "input[0]") in found
    assert ("batch", "discriminator", "input[0]") in found
    assert ("forward", "discriminator", "input[0]") in found  # what the generator made is no batch
    assert ("grad", "generator.body.2.weight", "grad") in found
    assert ("grad", "discriminator.body.0.bias", "grad") in found
    assert ("optimizer", "generator.body.0.weight", "exp_avg") in found


def test_micro_steps_and_evaluation_of_a_script_are_told_apart(tmp_path: Path) -> None:
    ended = recorded_warm(SCRIPTS / "mlp.py", tmp_path / "weights.pt", output=tmp_path / "recording")

    assert ended.said == [
        f"Recorded in {tmp_path / 'recording'}: 8 steps of AdamW.",
        "Models: Sequential, 6 parameters.",
        "Not recorded: Linear, 2 parameters, which no optimizer trains.",
    ]
    for step in open_recording(str(tmp_path / "recording")).steps(0):
        losses = [one.micro_step for one in step.observations if one.phase == "loss"]
        assert losses == [0, 1]
        assert not [one for one in step.observations if one.stage == "evaluation"]


def test_settings_are_those_of_a_recording(tmp_path: Path) -> None:
    options = ("--steps", "1-", "--every", "2", "--observe", "grad,loss", "--select", "0.*", "--select", "4")
    recorded_warm(*options, SCRIPTS / "mlp.py", tmp_path / "weights.pt", output=tmp_path / "recording")
    found = open_recording(str(tmp_path / "recording"))

    assert [step.step for step in found.steps(0)] == [2, 4, 6]
    assert {one[:2] for one in sites(tmp_path / "recording")} == {
        ("grad", "0.weight"), ("grad", "0.bias"), ("loss", "loss")
    }  # fmt: skip
