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


JOINS: dict[str, tuple[Callable[[list[Tensor]], Tensor], set[str]]] = {
    "rows": (lambda parts: torch.cat(parts), set()),
    "rows, transposed": (lambda parts: torch.cat(parts).t(), {"transpose = true"}),
    "columns": (lambda parts: torch.cat(parts, 1), {"columns = true"}),
    "columns, transposed": (lambda parts: torch.cat(parts, 1).t(), {"columns = true", "transpose = true"}),
    "columns, head by head": (
        lambda parts: torch.cat([one.unflatten(1, (2, 3)) for one in parts], 2).flatten(1),
        {"columns = true", "groups = 2"},
    ),
}


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("shape", [(8, 6), (6, 6)])
@pytest.mark.parametrize("join", JOINS)
def test_parts_are_joined_by_rows_or_by_columns(
    tmp_path: Path, join: str, shape: tuple[int, int], *, back: bool
) -> None:
    join_parts, keys = JOINS[join]

    def model(seed: int) -> tuple[State, State]:
        generator = torch.Generator().manual_seed(seed)
        parts = {
            f"h.{layer}.{name}.weight": torch.randn(shape, generator=generator) for layer in range(2) for name in "qkv"
        }
        whole = {
            f"h.{layer}.c_attn.weight": join_parts([parts[f"h.{layer}.{name}.weight"] for name in "qkv"]).contiguous()
            for layer in range(2)
        }
        return (whole, parts) if back else (parts, whole)

    found = traindiff.weights(*model(0))
    assert (found.verdict, {one.kind for one in found.relations}) == ("equivalent", {"fused"})
    assert write_map(found, tmp_path / "map.toml") == 1
    text = (tmp_path / "map.toml").read_text()
    assert {one for one in ("columns = true", "transpose = true", "groups = 2") if one in text} == keys
    assert traindiff.weights(*model(1), map=tmp_path / "map.toml").verdict == "identical"
    baseline, candidate = model(2)
    name = next(iter(candidate))
    other = candidate[name].clone()
    other[1, 1] += 1.0
    (one,) = traindiff.weights(baseline, candidate | {name: other}, map=tmp_path / "map.toml").differences
    assert one.candidate[0].startswith(name)
    assert one.evidence["rows"] == 1


@pytest.mark.parametrize("transposed", [False, True])
def test_the_columns_of_experts_are_joined_in_each_matrix_of_a_stack(tmp_path: Path, *, transposed: bool) -> None:
    def model(seed: int) -> tuple[State, State]:
        generator = torch.Generator().manual_seed(seed)
        names = [[f"experts.{expert}.{part}.weight" for part in ("gate", "up")] for expert in range(4)]
        parts = {name: torch.randn(8, 6, generator=generator) for own in names for name in own}
        whole = torch.stack([torch.cat([parts[name] for name in own], 1) for own in names])
        return parts, {"gate_up": (whole.transpose(1, 2) if transposed else whole).contiguous()}

    found = traindiff.weights(*model(0))
    assert found.verdict == "equivalent"
    assert write_map(found, tmp_path / "map.toml") == 1
    assert traindiff.weights(*model(1), map=tmp_path / "map.toml").verdict == "identical"


@pytest.mark.parametrize("transposed", [False, True])
def test_the_columns_of_stacks_are_joined_matrix_by_matrix(tmp_path: Path, *, transposed: bool) -> None:
    def model(seed: int) -> tuple[State, State]:
        generator = torch.Generator().manual_seed(seed)
        parts = {
            f"l.{n}.{name}": torch.randn(4, 6, 5, generator=generator) for n in range(2) for name in ("gate", "up")
        }
        whole = {f"l.{n}.gate_up": torch.cat([parts[f"l.{n}.gate"], parts[f"l.{n}.up"]], 2) for n in range(2)}
        return parts, {name: (one.transpose(1, 2) if transposed else one).contiguous() for name, one in whole.items()}

    found = traindiff.weights(*model(0))
    assert (found.verdict, {one.kind for one in found.relations}) == ("equivalent", {"fused"})
    assert write_map(found, tmp_path / "map.toml") == 1
    assert traindiff.weights(*model(1), map=tmp_path / "map.toml").verdict == "identical"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("names", [[f"experts.{n}.bias" for n in range(4)], ["first.bias", "second.bias"]])
def test_vectors_are_stacked_as_rows_or_as_columns(
    tmp_path: Path, names: list[str], dim: int, dtype: torch.dtype
) -> None:
    def model(seed: int) -> tuple[State, State]:
        generator = torch.Generator().manual_seed(seed)
        parts = {name: torch.randn(6, generator=generator, dtype=torch.float64).to(dtype) for name in names}
        return parts, {"biases": torch.stack([*parts.values()], dim)}

    found = traindiff.weights(*model(0))
    assert (found.verdict, found.relations[0].kind) == ("equivalent", "fused")
    assert write_map(found, tmp_path / "map.toml") == 1
    assert traindiff.weights(*model(1), map=tmp_path / "map.toml").verdict == "identical"
    parts, whole = model(2)
    whole["biases"][1, 1] += 1
    assert traindiff.weights(parts, whole, map=tmp_path / "map.toml").verdict == "diverged"
    shuffled = {"biases": model(0)[1]["biases"].flatten().flip(0).reshape(whole["biases"].shape)}
    assert traindiff.weights(model(0)[0], shuffled).verdict == "diverged"


def test_of_a_layer_that_several_layouts_fit_the_map_has_that_of_the_others(tmp_path: Path) -> None:
    def model(seed: int, first: Tensor) -> tuple[State, State]:
        generator = torch.Generator().manual_seed(seed)
        parts = {f"h.{n}.{name}": torch.randn(6, 6, generator=generator) for n in range(3) for name in ("q", "k")}
        parts |= {"h.0.q": first, "h.0.k": 2.0 * first}
        return parts, {f"h.{n}.qk": torch.cat([parts[f"h.{n}.q"], parts[f"h.{n}.k"]], 1) for n in range(3)}

    found = traindiff.weights(*model(0, torch.diag(torch.arange(1.0, 7.0))))
    assert found.verdict == "equivalent"
    write_map(found, tmp_path / "map.toml")
    result = traindiff.weights(*model(1, torch.randn(6, 6)), map=tmp_path / "map.toml")
    assert (result.verdict, result.notes) == ("identical", ())


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([torch.ones(6), torch.ones(6)], "Only matrices, and stacks of matrices, have columns"),
        ([torch.ones(6, 2), torch.ones(6, 2).bfloat16()], "Parts must have one dtype"),
    ],
)
def test_parts_that_cannot_be_joined_by_columns_are_told_why(tmp_path: Path, parts: list[Tensor], why: str) -> None:
    (tmp_path / "map.toml").write_text('[[tensor]]\nbaseline = ["a", "b"]\ncandidate = ["ab"]\ncolumns = true\n')
    with pytest.raises(ConfigError, match=why):
        traindiff.weights({"a": parts[0], "b": parts[1]}, {"ab": torch.ones(6, 4)}, map=tmp_path / "map.toml")


def test_a_layer_whose_columns_are_in_another_order_than_those_of_the_others_is_another_model() -> None:
    torch.manual_seed(0)
    parts = {f"h.{layer}.{name}.weight": torch.randn(8, 6) for layer in range(3) for name in "qkv"}
    whole = {
        f"h.{layer}.c_attn.weight": torch.cat(
            [parts[f"h.{layer}.{name}.weight"] for name in ("vkq" if layer == 1 else "qkv")], 1
        )
        for layer in range(3)
    }
    (found,) = traindiff.weights(parts, whole).differences

    assert (found.kind, found.candidate) == ("unlike", ("h.1.c_attn.weight",))


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


def test_a_map_that_puts_parts_of_recordings_together_says_that_these_have_only_summaries(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    map_text = '[[tensor]]\nbaseline = ["0.weight", "1.weight"]\ncandidate = ["fused.weight"]\ncolumns = true\n'
    (tmp_path / "map.toml").write_text(map_text)

    with pytest.raises(ConfigError, match=r"a recording has only summaries of it\. Compare saved weights"):
        traindiff.weights(tmp_path / "run", {"fused.weight": torch.ones(4, 8)}, map=tmp_path / "map.toml")


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
