"""Adapters that are merged, not merged, or merged otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import traindiff
from tests.state.models import State
from traindiff.errors import CheckpointError

torch.manual_seed(0)
BASE: State = {f"layers.{number}.proj.weight": torch.randn(48, 32) * 0.02 for number in range(3)} | {
    "norm.weight": torch.randn(32)
}
FACTORS: State = {
    f"base_model.model.layers.{number}.proj.lora_{which}.weight": torch.randn(shape) * 0.05
    for number in range(3)
    for which, shape in (("A", (4, 32)), ("B", (48, 4)))
}


def merged(scale: float) -> State:
    return {
        name: value + scale * FACTORS[_factor(name, "B")] @ FACTORS[_factor(name, "A")] if "proj" in name else value
        for name, value in BASE.items()
    }


def _factor(name: str, which: str) -> str:
    return f"base_model.model.{name.removesuffix('weight')}lora_{which}.weight"


def in_peft() -> State:
    """As a model with an adapter has it."""
    made = {name.replace(".weight", ".default.weight"): value for name, value in FACTORS.items()}
    for name, value in BASE.items():
        made[f"base_model.model.{name.replace('.weight', '.base_layer.weight') if 'proj' in name else name}"] = value
    return made


@pytest.mark.parametrize("scale", [2.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("back", [False, True])
def test_a_merged_adapter_is_equivalent_and_its_scale_is_named(scale: float, dtype: torch.dtype, *, back: bool) -> None:
    sides = [in_peft(), {name: value.to(dtype) for name, value in merged(scale).items()}]
    result = traindiff.weights(*(reversed(sides) if back else sides))

    assert result.verdict == "equivalent"
    found = [one for one in result.relations if one.kind == "merged"]
    whole = f"is W + s B A with s = {scale:g}{', rounded to bfloat16' if dtype == torch.bfloat16 else ''}"
    assert {one.message for one in found} == {f"is W; the baseline's {whole}" if back else whole}
    assert len(found) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_that_is_subtracted_is_a_difference(dtype: torch.dtype) -> None:
    result = traindiff.weights(in_peft(), {name: value.to(dtype) for name, value in merged(-2.0).items()})

    assert [one.kind for one in result.differences] == ["factor"] * 3
    assert "with s = -2" in result.differences[0].message
    assert result.differences[0].message.endswith(": the adapter is subtracted, not added")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_that_most_weights_do_not_have_is_a_difference(dtype: torch.dtype) -> None:
    name = "layers.1.proj.weight"
    made = merged(2.0) | {name: merged(4.0)[name]}
    (found,) = traindiff.weights(in_peft(), {key: value.to(dtype) for key, value in made.items()}).differences

    assert (found.kind, found.candidate) == ("factor", (name,))
    assert found.message.endswith("; it is 2 in most others")


def test_factors_that_follow_from_the_ranks_are_one() -> None:
    # alpha is 8 everywhere: the factor is 2 at rank 4, and 1 at rank 8
    wide = {
        name: torch.cat([value, torch.randn_like(value) * 0.05], dim=int("lora_B" in name)) if ".1." in name else value
        for name, value in FACTORS.items()
    }
    made = dict(merged(2.0))
    made["layers.1.proj.weight"] = (
        BASE["layers.1.proj.weight"]
        + wide[_factor("layers.1.proj.weight", "B")] @ wide[_factor("layers.1.proj.weight", "A")]
    )

    assert traindiff.weights(wide, made, base=BASE).verdict == "equivalent"


def test_the_configuration_of_a_side_without_adapters_does_not_count(tmp_path: Path) -> None:
    save_file(merged(2.0), tmp_path / "model.safetensors")
    (tmp_path / "adapter_config.json").write_text('{"lora_alpha": 32, "r": 4}')

    for sides in ((FACTORS, tmp_path), (tmp_path, FACTORS)):
        assert traindiff.weights(*sides, base=BASE).verdict == "equivalent"


def test_the_factor_is_the_one_that_the_configuration_says(tmp_path: Path) -> None:
    save_file(FACTORS, tmp_path / "adapter_model.safetensors")
    config = tmp_path / "adapter_config.json"
    one = merged(2.0) | {"layers.1.proj.weight": merged(4.0)["layers.1.proj.weight"]}

    config.write_text('{"lora_alpha": 8, "r": 4}')
    assert traindiff.weights(tmp_path, merged(2.0), base=BASE).verdict == "equivalent"
    twice = traindiff.weights(tmp_path, merged(4.0), base=BASE)
    config.write_text('{"lora_alpha": 8, "r": 4, "alpha_pattern": {"layers.1.proj": 16}}')
    assert traindiff.weights(tmp_path, one, base=BASE).verdict == "equivalent"
    config.write_text('{"lora_alpha": 4, "r": 4, "use_rslora": true}')
    assert traindiff.weights(tmp_path, merged(2.0), base=BASE).verdict == "equivalent"
    config.write_text('{"lora_alpha": "8"}')
    with pytest.raises(CheckpointError, match=r"adapter_config.json cannot be read: lora_alpha must be a number"):
        traindiff.weights(tmp_path, merged(2.0), base=BASE)

    assert {found.kind for found in twice.differences} == {"factor"}
    assert twice.differences[0].message.endswith("with s = 4; the adapter's configuration says 2")


def test_an_adapter_of_transposed_weights_is_found() -> None:
    def turned(state: State) -> State:
        return {name: value.t().contiguous() if value.dim() > 1 else value for name, value in state.items()}

    assert traindiff.weights(FACTORS, turned(merged(2.0)), base=turned(BASE)).verdict == "equivalent"


def test_an_adapter_that_is_not_merged_is_a_difference() -> None:
    result = traindiff.weights(in_peft(), {name: value.bfloat16() for name, value in BASE.items()})

    assert [one.kind for one in result.differences] == ["not-merged"] * 3
    assert result.exit_code == 1


def test_an_adapter_alone_is_held_against_a_base() -> None:
    assert traindiff.weights(FACTORS, merged(2.0), base=BASE).verdict == "equivalent"
    assert {one.kind for one in traindiff.weights(FACTORS, BASE, base=BASE).differences} == {"not-merged"}


def test_something_else_in_the_weight_is_not_called_merged() -> None:
    other = merged(2.0)
    other["layers.1.proj.weight"] = other["layers.1.proj.weight"] + 1e-4 * torch.randn(48, 32)
    (found,) = traindiff.weights(in_peft(), other).differences

    assert (found.kind, found.candidate) == ("other", ("layers.1.proj.weight",))


def test_an_adapter_below_rounding_is_neither_called_merged_nor_not() -> None:
    small = {name: value * 1e-4 if "lora_B" in name else value for name, value in in_peft().items()}
    result = traindiff.weights(small, {name: value.bfloat16() for name, value in BASE.items()})

    assert result.verdict == "equivalent"
    assert any("hides whether the adapter is merged" in one.message for one in result.relations)


def test_an_adapter_of_zeros_changes_nothing() -> None:
    fresh = {name: torch.zeros_like(value) if "lora_B" in name else value for name, value in in_peft().items()}

    assert traindiff.weights(fresh, BASE).verdict == "equivalent"


def test_two_sides_with_adapters_are_compared_as_they_are() -> None:
    other = in_peft()
    name = next(name for name in other if "lora_B" in name)

    assert traindiff.weights(in_peft(), in_peft()).verdict == "identical"
    assert [one.name for one in traindiff.weights(in_peft(), other | {name: 2 * other[name]}).differences] == [name]


def test_factors_without_a_partner_that_fits_are_told() -> None:
    name = "layers.0.proj"
    lone, unlike = in_peft(), in_peft()
    del lone[f"base_model.model.{name}.lora_B.default.weight"]
    unlike[f"base_model.model.{name}.lora_B.default.weight"] = torch.randn(48, 5)
    second = in_peft() | {f"base_model.model.{name}.lora_A.other.weight": torch.randn(4, 32)}
    plain = merged(1.0) | {f"{name}.weight": BASE[f"{name}.weight"]}

    for side, expected in ((lone, ["lora_A.default"]), (unlike, ["lora_A.default", "lora_B.default"])):
        result = traindiff.weights(side, plain)
        assert result.verdict == "incomplete"
        assert [one.baseline for one in result.relations if one.word == "only"] == [
            (f"base_model.model.{name}.{which}.weight",) for which in expected
        ]
    assert [one.baseline for one in traindiff.weights(second, merged(1.0)).relations if one.word == "only"] == [
        (f"base_model.model.{name}.lora_A.other.weight",)
    ]


def test_an_adapter_of_a_weight_that_is_not_there_is_told() -> None:
    factors = {f"base_model.model.head.lora_{which}.default.weight": torch.randn(4, 4) for which in "AB"}

    result = traindiff.weights(in_peft() | factors, merged(1.0))

    assert (result.verdict, result.counts()["only"]) == ("incomplete", 2)
    assert {one.baseline for one in result.relations if one.word == "only"} == {(name,) for name in factors}
