"""Maps: proposed, read and applied; and accepted differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import traindiff
from tests.state.models import State, bfloat16, hugging_face, megatron, torchtitan
from traindiff.errors import ConfigError
from traindiff.state.maps import write_map

STATE = hugging_face()
OTHER = hugging_face(seed=1)


def changed(state: Mapping[str, Tensor], name: str) -> State:
    """With one row of a tensor scaled."""
    value = state[name].clone()
    value[5] *= 1.5
    return {**state, name: value}


@pytest.mark.parametrize(
    ("convert", "fused"),
    [(torchtitan, "layers.1.attention.wq.weight"), (megatron, "decoder.layers.1.self_attention.linear_qkv.weight")],
)
@pytest.mark.parametrize("back", [False, True])
def test_a_proposed_map_of_one_model_makes_another_the_same_and_locates_its_fault(
    tmp_path: Path, convert: Callable[[Mapping[str, Tensor]], State], fused: str, *, back: bool
) -> None:
    def sides(state: Mapping[str, Tensor], converted: Mapping[str, Tensor]) -> tuple[State, State]:
        return ({**converted}, {**state}) if back else ({**state}, {**converted})

    path = tmp_path / "map.toml"
    count = write_map(traindiff.weights(*sides(STATE, convert(STATE))), path)

    assert count == path.read_text().count("[[tensor]]") < len(STATE) / 2  # one for all layers
    assert traindiff.weights(*sides(OTHER, convert(OTHER)), map=path).verdict == "identical"
    assert traindiff.weights(*sides(OTHER, bfloat16(convert(OTHER))), map=path).verdict == "equivalent"
    (found,) = traindiff.weights(*sides(OTHER, changed(convert(OTHER), fused)), map=path).differences
    assert fused in (*found.baseline, *found.candidate)
    assert found.evidence["rows"] == 1


def test_a_transposed_map_is_proposed_and_applied(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = {f"h.{layer}.{name}.weight": torch.randn(8, 6) for layer in range(2) for name in "qkv"}
    whole = {
        f"h.{layer}.c_attn.weight": torch.cat([parts[f"h.{layer}.{name}.weight"] for name in "qkv"]).t().contiguous()
        for layer in range(2)
    }
    write_map(traindiff.weights(parts, whole), tmp_path / "map.toml")

    assert "transpose = true" in (tmp_path / "map.toml").read_text()
    assert traindiff.weights(parts, whole, map=tmp_path / "map.toml").verdict == "identical"


def test_an_entry_that_names_nothing_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('[[tensor]]\nbaseline = ["nothing"]\ncandidate = ["here"]\n')

    notes = traindiff.weights(STATE, dict(STATE), map=tmp_path / "map.toml").notes
    assert notes == ("Warning: entry 1 of the map (nothing) names tensors that are not there.",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no table [[tensor]]"),
        ("tensor = 3", "has no table [[tensor]]"),
        ("[[tensor]", "is not TOML"),
        ('[[tensor]]\nbaseline = ["a"]', 'it has no "candidate"'),
        ('[[tensor]]\nbaseline = ["a", "b"]\ncandidate = ["c", "d"]', "must be a single tensor"),
        ('[[tensor]]\nbaseline = ["a"]\ncandidate = ["b"]\nheads = [1, 2]', "heads has 2 numbers"),
        ('[[tensor]]\nbaseline = ["a.{n}"]\ncandidate = ["b"]', "in some of its names only"),
        ('[[tensor]]\nbaseline = ["a"]\ncandidate = ["b"]\njoin = "interleave"', "groups belongs to join"),
        ('[[tensor]]\nbaseline = ["a"]\ncandidate = ["b"]\ngrops = 3', '"grops" is not known'),
        ('[[tensor]]\nbaseline = ["lm_head.weight", "model.norm.weight"]\ncandidate = ["model.embed_tokens.weight"]',
         "do not make up"),
    ],
)  # fmt: skip
def test_a_map_that_cannot_be_used_is_an_error_that_names_the_entry(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "map.toml").write_text(text)

    with pytest.raises(ConfigError) as caught:
        traindiff.weights(STATE, dict(STATE), map=tmp_path / "map.toml")
    assert words in str(caught.value)


def test_an_accepted_difference_is_listed_with_its_reason_and_not_judged(tmp_path: Path) -> None:
    entries = '[[accept]]\nname = "lm_head.*"\nreason = "a new head"\n[[accept]]\nname = "other"\nreason = "none"\n'
    (tmp_path / "accept.toml").write_text(entries)
    candidate = {**STATE, "lm_head.weight": OTHER["lm_head.weight"]}
    result = traindiff.weights(STATE, candidate, accept=tmp_path / "accept.toml")

    assert (result.verdict, result.counts()["accepted"]) == ("equivalent", 1)
    assert "(accepted: a new head)" in str(result)
    assert result.notes == ('Warning: nothing that differs is named "other", as --accept says it may (none).',)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no table [[accept]]"),
        ('[[accept]]\nname = "a"', "without name or reason: number 1"),
        ('[[accept]]\nname = "a"\nreason = " "', "without name or reason: number 1"),
        ('[[accept]]\nname = "a"\nreason = "b"\nwhy = "c"', '"why" in entry 1'),
    ],
)
def test_accepted_differences_without_a_reason_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "accept.toml").write_text(text)

    with pytest.raises(ConfigError) as caught:
        traindiff.weights(STATE, dict(STATE), accept=tmp_path / "accept.toml")
    assert words in str(caught.value)
