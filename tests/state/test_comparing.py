"""What `traindiff.weights` says of models that were converted, sharded, cast or mixed up."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

import traindiff
from tests.state.models import GROUPS, HEADS, LAYERS, State, bfloat16, hugging_face, megatron, pairs, torchtitan
from traindiff.errors import CheckpointError
from traindiff.state.comparison import WeightsComparison, common_numbers

STATE = hugging_face()
QUERY = "model.layers.1.self_attn.q_proj.weight"
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


def weights(baseline: Mapping[str, Tensor], candidate: Mapping[str, Tensor]) -> WeightsComparison:
    return traindiff.weights({**baseline}, {**candidate})


def of_kind(result: WeightsComparison) -> dict[str, set[str]]:
    """Names in the candidate (or else in the baseline) by kind, without what is identical."""
    found: dict[str, set[str]] = {}
    for one in result.relations:
        if one.kind != "identical":
            found.setdefault(one.kind, set()).add(one.name)
    return found


def test_the_same_bits_are_identical() -> None:
    result = weights(STATE, {name: value.clone() for name, value in STATE.items()})

    assert (result.verdict, result.exit_code, len(result.relations)) == ("identical", 0, len(STATE))


def test_one_changed_element_is_found_with_its_row() -> None:
    changed = STATE[UP].clone()
    changed[17, 3] += 1e-6
    result = weights(STATE, STATE | {UP: changed})

    assert (result.verdict, result.exit_code) == ("diverged", 1)
    (found,) = result.differences
    assert (found.candidate, found.evidence["unequal"], found.evidence["first_row"]) == ((UP,), 1, 17)
    assert "1 of 6144 elements differ, all in row 17 of 96" in found.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("back", [False, True])
def test_a_cast_is_named_in_both_directions(dtype: torch.dtype, *, back: bool) -> None:
    short = {name: value.to(dtype) for name, value in STATE.items()}
    result = weights(short, STATE) if back else weights(STATE, short)

    assert result.verdict == "equivalent"
    assert of_kind(result) == {"cast": {*STATE}}
    assert {one.evidence["dtype"] for one in result.relations} == {str(dtype).removeprefix("torch.")}


def test_a_cast_that_cuts_off_is_told_from_one_that_rounds() -> None:
    cut = {name: (value.view(torch.int32) & -65536).view(torch.float32).bfloat16() for name, value in STATE.items()}
    result = weights(STATE, cut)

    assert result.verdict == "equivalent"
    assert {one.evidence["rounding"] for one in result.relations if one.name == UP} == {"truncated"}


def test_a_cast_that_rounds_up_or_down_by_chance_is_called_that() -> None:
    torch.manual_seed(0)
    low = (STATE[UP].view(torch.int32) & -65536).view(torch.float32)
    high = ((STATE[UP].view(torch.int32) & -65536) + 65536).view(torch.float32)
    chosen = torch.where(torch.rand_like(low) < 0.5, low, high).bfloat16()
    (found,) = weights({UP: STATE[UP]}, {UP: chosen}).relations

    assert (found.word, found.kind, found.evidence["rounding"]) == ("equivalent", "cast", "other")


def test_numbers_that_went_through_a_shorter_dtype_are_found() -> None:
    result = weights(STATE, {name: value.bfloat16().float() for name, value in STATE.items()})

    assert result.verdict == "equivalent"
    assert of_kind(result) == {"through": {name for name, value in STATE.items() if value.std() > 0}}


def test_a_small_change_of_rounded_numbers_is_no_rounding() -> None:
    torch.manual_seed(0)
    rounded = STATE[UP].bfloat16().float()
    for near in (rounded, torch.ones_like(rounded)):
        (found,) = weights({UP: near}, {UP: near * (1 + 1e-5 * torch.randn_like(near))}).relations
        assert (found.word, found.kind) == ("differs", "other")


DOUBLE = {
    "float32 as bfloat16": (torch.float32, torch.float16, torch.bfloat16, "rounded to float16 and then to bfloat16"),
    "bfloat16": (torch.bfloat16, torch.float16, torch.bfloat16, "rounded to float16 and then to bfloat16"),
    "float32": (torch.float32, torch.float16, torch.float32, "rounded to float16 and stored as float32"),
    "float16": (torch.float16, torch.bfloat16, torch.float16, "rounded to bfloat16 and then to float16"),
    "float32 as float16": (torch.float32, torch.bfloat16, torch.float16, "rounded to bfloat16 and then to float16"),
    "8 bits": (torch.float32, torch.float8_e4m3fn, torch.bfloat16, "rounded to float8_e4m3fn and stored as bfloat16"),
}


@pytest.mark.parametrize("case", DOUBLE)
@pytest.mark.parametrize("size", [1.0, 1e-5], ids=["normal", "subnormal"])
def test_two_casts_in_a_row_are_named(case: str, size: float) -> None:
    first, between, last, words = DOUBLE[case]
    value = (torch.randn(64, 64) * size).to(first)
    if size < 1 and between != torch.float16 and last != torch.float16:
        value = value * 1e4  # of 8 bits, nothing is left
    changed = value.to(between).to(last)
    (forward,) = weights({UP: value}, {UP: changed}).relations
    (back,) = weights({UP: changed}, {UP: value}).relations

    if torch.equal(value.to(last), changed):  # normal bfloat16 in float16, or no tie
        assert (case, size, forward.kind) == ("bfloat16", 1.0, "identical")
    else:
        assert forward.word == back.word == "equivalent"
        assert forward.message == f"is the baseline's, {words}"
        assert back.message == f"has more digits: the baseline's is it {words}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("back", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [UP, "other.name"])
def test_numbers_that_do_not_fit_into_a_dtype_are_a_difference(
    dtype: torch.dtype, back: torch.dtype | None, name: str
) -> None:
    large = torch.randn(96, 64)
    large[7, 7] = 1e5
    short = large.to(dtype) if back is None else large.to(dtype).to(back)
    if name != UP and back is not None:
        return  # is found by its name only
    (found,) = weights({UP: large, NORM: torch.ones(2)}, {name: short, NORM: torch.ones(2)}).differences

    assert found.kind == "overflow"
    assert "in which its largest numbers do not fit" in found.message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_not_a_number_and_infinity_stay_what_they_are_in_a_cast(dtype: torch.dtype) -> None:
    value = torch.randn(96, 64)
    value[3, 4], value[5, 5], value[6, 6] = torch.nan, -torch.nan, torch.inf

    for short in (value.to(dtype), value.to(dtype).float()):
        assert weights({UP: value}, {UP: short}).verdict == "equivalent"
        assert weights({UP: short}, {UP: value}).verdict == "equivalent"


@pytest.mark.parametrize("convert", [torchtitan, megatron])
@pytest.mark.parametrize("cast", [lambda state: state, bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("back", [False, True])
def test_a_conversion_to_another_library_is_equivalent_both_ways(
    convert: Callable[[Mapping[str, Tensor]], State], cast: Callable[[State], State], *, back: bool
) -> None:
    converted = cast(convert(STATE))
    result = weights(converted, STATE) if back else weights(STATE, converted)

    assert result.verdict == "equivalent"
    assert {name for one in result.relations for name in (one.candidate if back else one.baseline)} == {*STATE}


def test_rotary_pairs_under_other_names_are_a_layout_and_under_the_same_name_a_difference() -> None:
    converted = torchtitan(STATE)
    other_names = weights(STATE, converted)
    same_name = weights(STATE, STATE | {QUERY: pairs(STATE[QUERY], HEADS)})

    (layout,) = {one.layout for one in other_names.relations if ".wk." in one.name}
    assert layout is not None
    assert layout.heads == (GROUPS,)
    assert (same_name.verdict, of_kind(same_name)) == ("diverged", {"rearranged": {QUERY}})
    assert f"rotary halves to interleaved pairs in {HEADS} heads" in same_name.differences[0].message


def test_grouped_queries_keys_and_values_are_found_in_one_tensor() -> None:
    result = weights(STATE, megatron(STATE))

    fused = [one for one in result.relations if "linear_qkv.weight" in one.name]
    assert {(one.kind, len(one.baseline)) for one in fused} == {("fused", 3)}
    assert {(one.layout.join, one.layout.groups) for one in fused if one.layout} == {("interleave", GROUPS)}


@pytest.mark.parametrize("cast", [lambda state: state, bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("convert", [torchtitan, megatron])
def test_a_fault_in_a_converted_layer_is_located_by_what_the_other_layers_are(
    convert: Callable[[Mapping[str, Tensor]], State], cast: Callable[[State], State]
) -> None:
    converted = convert(STATE)
    for name in [name for name in converted if ".1." in name and "norm" not in name]:
        changed = converted[name].clone()
        changed[5, 5] += 1
        result = weights(STATE, cast(converted | {name: changed}))

        (found,) = result.differences
        assert (result.verdict, found.candidate, found.evidence["first_row"]) == ("diverged", (name,), 5)
        assert all(".1." in one for one in found.baseline)
        assert found.baseline[0] in found.message
        assert {one.word for one in result.relations} <= {"identical", "equivalent", "differs"}


def test_a_fault_in_the_parts_of_a_fused_tensor_is_located_too() -> None:
    changed = STATE[QUERY].clone()
    changed[5, 5] += 1
    (found,) = weights(megatron(STATE), STATE | {QUERY: changed}).differences

    assert len(found.candidate) == 3
    assert found.baseline == ("decoder.layers.1.self_attention.linear_qkv.weight",)


@pytest.mark.parametrize("name", ["self_attention.linear_qkv", "mlp.linear_fc1"])
@pytest.mark.parametrize("cast", [lambda state: state, bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("back", [False, True])
def test_fused_tensors_that_are_swapped_between_layers_are_named(
    name: str, cast: Callable[[State], State], *, back: bool
) -> None:
    converted = megatron(STATE)
    names = [f"decoder.layers.{layer}.{name}.weight" for layer in (0, 2)]
    swapped = cast(converted | {names[0]: converted[names[1]], names[1]: converted[names[0]]})
    result = weights(swapped, STATE) if back else weights(STATE, swapped)

    layers = "model.layers" if back else "decoder.layers"
    assert (result.verdict, [one.kind for one in result.differences]) == ("diverged", ["moved"] * 2)
    assert [sentence.partition(",")[0] for sentence in result.sentences] == [f"{layers}: 0 and 2 are swapped"]
    assert result.counts()["only"] == 0


def _from_one(state: Mapping[str, Tensor]) -> State:
    """The same model with its layers numbered from 1."""
    return {
        re.sub(r"layers\.(\d+)", lambda match: f"layers.{int(match[1]) + 1}", name): value
        for name, value in state.items()
    }


@pytest.mark.parametrize("convert", [torchtitan, megatron])
@pytest.mark.parametrize("back", [False, True])
def test_layers_that_are_numbered_from_one_are_the_same_model(
    convert: Callable[[Mapping[str, Tensor]], State], *, back: bool
) -> None:
    converted = _from_one(convert(STATE))
    result = weights(converted, STATE) if back else weights(STATE, converted)

    assert result.verdict == "equivalent"
    norms = [one for one in result.relations if len(one.candidate) == 1 and "norm" in one.name and "layers" in one.name]
    apart = {common_numbers(one.candidate)[0] - common_numbers(one.baseline)[0] for one in norms}
    assert (len(norms), apart) == (2 * LAYERS, {-1 if back else 1})


def test_layers_that_moved_by_one_leave_nothing_that_only_one_side_has() -> None:
    varied = {name: torch.randn(64) if "norm" in name else value for name, value in STATE.items()}
    result = weights(varied, _from_one(varied))

    assert result.sentences == ("model.layers: 1 to 3 hold what the baseline has in 0 to 2: layers are shifted.",)
    assert (result.verdict, result.counts()["only"]) == ("diverged", 0)


def test_biases_of_zeros_are_fused_as_their_weights_are() -> None:
    torch.manual_seed(0)
    parts = {f"h.{layer}.{name}.weight": torch.randn(8, 8) for layer in range(3) for name in "qkv"}
    parts |= {name.replace("weight", "bias"): torch.zeros(8) for name in parts}
    whole: State = {}
    for layer in range(3):
        for end in ("weight", "bias"):
            whole[f"h.{layer}.qkv.{end}"] = torch.cat([parts[f"h.{layer}.{name}.{end}"] for name in "qkv"])
    ones = whole | {"h.1.qkv.bias": torch.ones(24)}

    for first, second in ((parts, whole), (whole, parts), (parts, bfloat16(whole))):
        assert weights(first, second).verdict == "equivalent"
        assert {one.kind for one in weights(first, second).relations} == {"fused"}
    assert [(one.kind, one.candidate) for one in weights(parts, ones).differences] == [("zero", ("h.1.qkv.bias",))]


def test_stacked_experts_are_found() -> None:
    torch.manual_seed(0)
    experts = {f"mlp.experts.{number}.{name}.weight": torch.randn(6, 8) for number in range(4) for name in ("w1", "w3")}
    one, two = (
        torch.stack([experts[f"mlp.experts.{number}.{name}.weight"] for number in range(4)]) for name in ("w1", "w3")
    )
    joined = {"mlp.gate_up_proj": torch.cat([one, two], dim=1)}

    assert of_kind(weights(experts, {"mlp.w1": one, "mlp.w3": two})) == {"fused": {"mlp.w1", "mlp.w3"}}
    (found,) = weights(experts, joined).relations
    assert (found.word, found.kind, len(found.baseline)) == ("equivalent", "fused", 8)


def test_transposed_layers_of_gpt2_are_found() -> None:
    torch.manual_seed(0)
    parts = {f"h.0.attn.{name}.weight": torch.randn(8, 8) for name in "qkv"} | {"h.0.mlp.fc.weight": torch.randn(12, 8)}
    whole = {
        "h.0.attn.c_attn.weight": torch.cat([parts[f"h.0.attn.{name}.weight"] for name in "qkv"]).t().contiguous(),
        "h.0.mlp.c_fc.weight": parts["h.0.mlp.fc.weight"].t().contiguous(),
    }

    for first, second in ((parts, whole), (whole, parts)):
        result = weights(first, second)
        assert result.verdict == "equivalent"
        assert {one.layout.transpose for one in result.relations if one.layout} == {True}


FAULTS: Mapping[str, tuple[Callable[[], State], str, str]] = {
    "scaled": (lambda: {UP: STATE[UP] * 2.5}, "scaled", "times 2.5"),
    "negated": (lambda: {UP: -STATE[UP]}, "scaled", "times -1"),
    "zero": (lambda: {UP: torch.zeros_like(STATE[UP])}, "zero", "is zero in all elements"),
    "one added": (lambda: {UP: STATE[UP] + 1}, "offset", "plus 1 in every element"),
    "transposed": (lambda: {QUERY: STATE[QUERY].t().contiguous()}, "rearranged", "transposed"),
    "rows reversed": (lambda: {UP: STATE[UP].flip(0)}, "rearranged", "rows are in another order"),
    "heads swapped": (
        lambda: {QUERY: STATE[QUERY][[*range(16, 32), *range(16), *range(32, 64)]]},
        "rearranged",
        "2 of 4 blocks of 16 rows are in another order",
    ),
    "columns in another order": (lambda: {UP: STATE[UP].roll(1, 1)}, "rearranged", "columns are in another order"),
    "a shard twice": (lambda: {UP: torch.cat([STATE[UP][:48]] * 2)}, "repeated-shard", "rows 48 to 95 of 96"),
    "a shard missing": (
        lambda: {DOWN: torch.cat([STATE[DOWN][:, :48], torch.zeros(64, 48)], 1)},
        "missing-shard",
        "zeros in columns 48 to 95 of 96",
    ),
    "a shard of a vector missing": (
        lambda: {NORM: torch.cat([torch.ones(32), torch.zeros(32)])},
        "missing-shard",
        "zeros in elements 32 to 63 of 64",
    ),
    "another tensor": (lambda: {UP: STATE[UP.replace("up", "gate")]}, "moved", "mlp.gate_proj"),
    "another shape": (lambda: {UP: STATE[UP][:, :60]}, "shape", "[96, 60]"),
    "noise": (lambda: {UP: STATE[UP] + 1e-4 * torch.randn(96, 64)}, "other", "6144 of 6144 elements differ"),
    "not a number": (lambda: {UP: STATE[UP] / torch.zeros(1)}, "other", "NaN or infinity"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("cast", [lambda state: state, bfloat16], ids=["float32", "bfloat16"])
def test_a_fault_is_named_for_what_it_is_with_and_without_a_cast(fault: str, cast: Callable[[State], State]) -> None:
    make, kind, words = FAULTS[fault]
    torch.manual_seed(0)
    made = make()
    result = weights(STATE, cast({**STATE, **made}))

    assert result.exit_code == 1
    assert {one.name: one.kind for one in result.differences} == dict.fromkeys(made, kind)
    assert words.replace("6144 of 6144 elements differ", "elements differ") in result.differences[0].message


def test_a_padded_vocabulary_is_equivalent_if_the_padding_is_zero() -> None:
    padded = torch.cat([STATE[EMBEDDING], torch.zeros(56, 64)])
    other = torch.cat([STATE[EMBEDDING], torch.ones(56, 64)])

    assert of_kind(weights(STATE, STATE | {EMBEDDING: padded})) == {"padded": {EMBEDDING}}
    assert weights(STATE, STATE | {EMBEDDING: padded}).verdict == "equivalent"
    assert weights(STATE | {EMBEDDING: padded}, bfloat16(STATE)).verdict == "equivalent"
    assert weights(STATE, STATE | {EMBEDDING: other}).verdict == "incomplete"


def test_tied_and_untied_embeddings_are_the_same_model() -> None:
    untied = STATE | {"lm_head.weight": STATE[EMBEDDING].clone()}
    tied = {name: value for name, value in untied.items() if name != "lm_head.weight"}

    for first, second in ((untied, tied), (tied, untied), (bfloat16(untied), tied)):
        result = weights(first, second)
        assert result.verdict == "equivalent"
        assert of_kind(result)["tied"] == {"lm_head.weight"}


def test_a_tensor_that_is_no_longer_tied_is_told_so() -> None:
    tied = STATE | {"lm_head.weight": STATE[EMBEDDING].clone()}
    (found,) = weights(tied, tied | {"lm_head.weight": 2.0 * STATE[EMBEDDING] + 1.0}).differences

    assert found.candidate == ("lm_head.weight",)
    assert found.message.endswith(f"; in the baseline it is {EMBEDDING} again (tied), in the candidate it is not")
    other = STATE[EMBEDDING] + 1.0
    both = weights(tied, tied | {"lm_head.weight": other, EMBEDDING: other.clone()})
    assert len(both.differences) == 2
    assert not any("tied" in one.message for one in both.differences)


def test_copies_that_are_equal_at_the_start_are_not_said_to_be_tied() -> None:
    """Layers, and a network with its target, begin with the same numbers."""
    torch.manual_seed(0)
    copied = {name: torch.randn(8, 8) for name in ("fc1.weight", "fc2.weight")}
    begun = {
        f"{net}.layers.{n}.{name}": one for net in ("online", "target") for n in (0, 1) for name, one in copied.items()
    }
    trained = {name: value + torch.randn(8, 8) for name, value in begun.items()}
    result = weights(begun, trained)

    assert len(result.differences) == len(begun)
    assert "tied" not in str(result)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_parts_of_complex_numbers_are_compared_as_numbers(dtype: torch.dtype) -> None:
    value = torch.randn(4, 4, dtype=dtype)
    value[1] = 0.0
    other = value.clone()
    torch.view_as_real(other)[1, :, 0] = -0.0
    assert of_kind(weights({"weight": value}, {"weight": other})) == {"bits": {"weight"}}
    other[2, 2] += 1.0
    (found,) = weights({"weight": value}, {"weight": other}).differences
    assert found.message == "differs in 1 of 16 elements"


@pytest.mark.parametrize("turned", [False, True])
def test_rows_of_zeros_of_the_other_sign_are_no_missing_shard(*, turned: bool) -> None:
    value = torch.randn(6, 5)
    value[2:4] = 0.0
    sides = [{"weight": value}, {"weight": torch.where(value == 0, -0.0, value)}]
    result = weights(*(sides[::-1] if turned else sides))

    assert (result.verdict, of_kind(result)) == ("equivalent", {"bits": {"weight"}})


def test_a_cast_with_zeros_of_the_other_sign_is_rounded_to_nearest() -> None:
    value = torch.randn(6, 5)
    value[2, 2] = 0.0
    result = weights({"weight": value}, {"weight": torch.where(value == 0, -0.0, value).bfloat16()})

    assert result.verdict == "equivalent"
    (found,) = result.relations
    assert found.message.startswith("is the baseline's as bfloat16: the same numbers in bfloat16, in other bits")


def test_parts_of_unequal_length_in_an_unknown_order_differ() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(8, 6), torch.randn(5, 6)
    shuffled = torch.cat([query, key])[torch.randperm(13)]
    for parts, whole in (((query, key), shuffled), ((query.t(), key.t()), shuffled.t())):
        sides = {"q": parts[0].contiguous(), "k": parts[1].contiguous()}, {"qk": whole.contiguous()}
        (found,) = weights(*sides).differences
        assert found.message.endswith("in an order that is not known")


def test_a_layer_of_zeros_that_is_fused_as_the_others_are_is_the_same() -> None:
    parts = {f"h.{n}.{name}": torch.randn(8, 6) * bool(n) for n in range(3) for name in ("q", "k")}
    whole = {f"h.{n}.qk": torch.cat([parts[f"h.{n}.q"], parts[f"h.{n}.k"]]) for n in range(3)}
    result = weights(parts, whole)

    assert of_kind(result) == {"fused": {f"h.{n}.qk" for n in range(3)}}
    assert str(result).startswith("equivalent: 3 tensors, the same numbers in another layout\n")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_zeros_of_the_other_sign_and_other_bits_of_nan_are_the_same_numbers(dtype: torch.dtype) -> None:
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    value = torch.randn(8, 8).to(dtype)
    value[2], value[3, :2] = 0.0, torch.nan
    other = value.clone()
    other[2, 1:] = -0.0
    other.view(bits)[3, 0] += 1
    result = weights({"weight": value, "same": value}, {"weight": other, "same": value.clone()})

    assert of_kind(result) == {"bits": {"weight"}}
    (found,) = (one for one in result.relations if one.kind == "bits")
    assert found.message == "has the same numbers in other bits: 7 zeros of the other sign and 1 NaN with other bits"
    assert str(result).startswith("equivalent: 2 tensors, the same numbers in other bits\n")


def _from_layers(places: Mapping[int, int], within: str = "") -> State:
    """A model of which some layers hold what others have, or only what has a text in its name."""
    made = dict(STATE)
    for here, there in places.items():
        for name in STATE:
            if f".layers.{here}." in name and within in name:
                made[name] = STATE[name.replace(f".layers.{here}.", f".layers.{there}.")]
    return made


@pytest.mark.parametrize(
    ("places", "within", "sentence"),
    [
        (
            {0: 1, 1: 2},
            "",
            "model.layers: 0 to 1 hold what the baseline has in 1 to 2: layers are shifted, in 14 of 18 tensors.",
        ),
        ({0: 2, 2: 0}, "", "model.layers: 0 and 2 are swapped, in 14 of 18 tensors."),
        (
            {0: 1, 1: 2, 2: 0},
            "",
            "model.layers: 0 to 1 hold what the baseline has in 1 to 2, 2 holds what the baseline has in 0, "
            "in 21 of 27 tensors.",
        ),
        ({0: 2, 2: 0}, "q_proj", "model.layers: 0 and 2 are swapped, in 2 of 18 tensors."),
        ({1: 0}, "down_proj", "model.layers: 1 holds what the baseline has in 0, in 1 of 9 tensors."),
    ],
)
def test_layers_in_another_order_are_said_in_one_sentence(
    places: Mapping[int, int], within: str, sentence: str
) -> None:
    # The two norms of each layer are ones, so they have the same bits in any order.
    result = weights(STATE, _from_layers(places, within))

    assert result.sentences == (sentence,)
    assert result.exit_code == 1


def test_layers_in_another_order_do_not_read_as_if_each_were_its_own() -> None:
    result = weights(STATE, _from_layers({0: 1, 1: 2, 2: 0}))

    assert "is the baseline's model.layers.*.mlp.up_proj.weight, under another number" in str(result)


def test_layers_under_other_names_must_be_in_the_same_order() -> None:
    def renamed(state: State, first: int = 0) -> State:
        made = {}
        for name, value in state.items():
            parts = name.replace("model.layers.", "decoder.blocks.").split(".")
            if parts[1] == "blocks":
                parts[2] = str(int(parts[2]) + first)
            made[".".join(parts)] = value
        return made

    swapped = weights(STATE, renamed(_from_layers({0: 2, 2: 0})))
    rounded = weights(STATE, bfloat16(renamed(_from_layers({0: 1, 1: 0}, "up_proj"))))

    assert weights(STATE, renamed(STATE)).verdict == "identical"
    varied = {name: torch.randn(64) if "norm" in name else value for name, value in STATE.items()}
    assert weights(varied, renamed(varied, first=1)).verdict == "identical"
    assert (swapped.verdict, len(swapped.differences)) == ("diverged", 14)
    assert swapped.sentences == ("decoder.blocks: 0 and 2 are swapped, in 14 of 18 tensors.",)
    assert {one.kind for one in rounded.differences} == {"moved"}
    assert rounded.sentences == ("decoder.blocks: 0 and 1 are swapped, in 2 of 18 tensors.",)


def test_a_layer_that_is_laid_out_unlike_the_others_is_another_model() -> None:
    made = torchtitan(STATE)
    key = "layers.1.attention.wk.weight"
    gate, up = "layers.1.feed_forward.w1.weight", "layers.1.feed_forward.w3.weight"
    kept = STATE["model.layers.1.self_attn.k_proj.weight"]

    assert weights(STATE, made).verdict == "equivalent"
    for cast in (lambda state: state, bfloat16):
        (found,) = weights(STATE, cast(made | {key: kept})).differences
        assert (found.kind, found.candidate) == ("unlike", (key,))
        assert "in 2 other layers, layers.*.attention.wk.weight is made up otherwise" in found.message
        swapped = weights(STATE, cast(made | {gate: made[up], up: made[gate]}))
        assert {one.name: one.kind for one in swapped.differences} == {gate: "unlike", up: "unlike"}
        assert all("is made up of other tensors" in one.message for one in swapped.differences)


def test_layers_that_could_be_laid_out_either_way_are_not_called_unlike_the_others() -> None:
    made = torchtitan(STATE)
    query, key = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
    rows = torch.randn(1, 64)
    same = STATE | {query: rows.expand(64, 64).clone(), key: torch.zeros(GROUPS * 16, 64)}
    alike = STATE | {name: STATE[name.replace("up_proj", "gate_proj")] for name in STATE if ".1.mlp.up" in name}

    assert weights(STATE, made).verdict == "equivalent"
    assert weights(same, torchtitan(same)).verdict == "equivalent"
    assert weights(alike, torchtitan(alike)).verdict == "equivalent"


def test_layers_of_other_shapes_have_layouts_of_their_own() -> None:
    torch.manual_seed(0)
    rows = {0: 64, 1: 64, 2: 32, 3: 64}
    made = {f"model.layers.{layer}.k.weight": torch.randn(count, 48) for layer, count in rows.items()}
    turned = {name.replace("model.layers", "blocks"): pairs(value, len(value) // 16) for name, value in made.items()}

    assert weights(made, turned).verdict == "equivalent"


def test_layers_of_other_names_are_not_called_unlike_the_others() -> None:
    flat = {f"{number}.weight": torch.randn(4, 4) for number in range(3)}
    named = {"body.0.weight": flat["0.weight"], "body.1.weight": flat["1.weight"], "head.weight": flat["2.weight"]}

    assert weights(named, flat).verdict == "identical"
    assert weights(named, flat).sentences == ()


def test_gate_and_up_that_are_swapped_are_said_in_one_sentence() -> None:
    made = {
        name.replace("gate", "?").replace("up_", "gate_").replace("?", "up"): value for name, value in STATE.items()
    }

    assert weights(STATE, made).sentences == (
        "model.layers.*.mlp.gate_proj.weight and model.layers.*.mlp.up_proj.weight are swapped, 3 times.",
    )


def test_an_adapter_that_was_never_applied_is_found_with_a_base() -> None:
    tuned = {name: value * 1.1 if "q_proj" in name else value for name, value in STATE.items()}
    result = traindiff.weights(tuned, bfloat16(STATE), base=dict(STATE))

    assert of_kind(result)["base"] == {name for name in STATE if "q_proj" in name}
    assert result.sentences[0].startswith(f"These {LAYERS} tensors are still those of ")


def test_a_missing_tensor_is_incomplete() -> None:
    less = {name: value for name, value in STATE.items() if name != UP}

    for first, second, kind in ((STATE, less, "only-baseline"), (less, STATE, "only-candidate")):
        result = weights(first, second)
        assert (result.verdict, result.exit_code, of_kind(result)) == ("incomplete", 3, {kind: {UP}})


def test_wrappers_and_a_prefix_are_no_difference() -> None:
    wrapped = {f"_orig_mod.module.{name}": value for name, value in STATE.items()}
    short = {name.removeprefix("model."): value * (1 + ("up" in name)) for name, value in STATE.items()}

    assert weights(STATE, wrapped).verdict == "identical"
    assert of_kind(weights(STATE, short)) == {"scaled": {name.removeprefix("model.") for name in STATE if "up" in name}}


def test_models_without_anything_in_common_are_an_error_that_names_some_tensors() -> None:
    with pytest.raises(CheckpointError, match=r'no tensor in common.*"model.embed_tokens.weight".*"other"'):
        weights(STATE, {"other": torch.randn(3)})


def test_the_optimizers_state_is_compared_where_both_have_it() -> None:
    state = {"state": {0: {"exp_avg": torch.randn(3, 4)}}}
    other = {"state": {0: {"exp_avg": torch.zeros(3, 4)}}}
    model = {"weight": torch.randn(3, 4)}
    result = traindiff.weights({"model": model, "optimizer": state}, {"model": model, "optimizer": other})

    assert [(one.name, one.role, one.kind) for one in result.differences] == [
        ("optimizer.state[0].exp_avg", "optimizer", "zero")
    ]
    assert traindiff.weights({"model": model, "optimizer": state}, model).verdict == "identical"


def test_integers_are_compared_by_value() -> None:
    ids = torch.arange(10)
    long = {"weight": torch.ones(2), "ids": ids}

    assert weights(long, {"weight": torch.ones(2), "ids": ids.int()}).verdict == "equivalent"
    assert weights(long, {"weight": torch.ones(2), "ids": ids.int() + 1}).verdict == "diverged"
    assert weights(long, {"weight": torch.ones(2), "ids": ids * ids}).differences[0].evidence["unequal"] == 8


def test_a_base_is_found_under_a_map(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(f'[[tensor]]\nbaseline = ["{UP}"]\ncandidate = ["up"]\n')
    candidate = {"up" if name == UP else name: value for name, value in STATE.items()}
    tuned = {**STATE, UP: STATE[UP] + 1e-3 * torch.randn(96, 64)}
    result = traindiff.weights(tuned, candidate, base=dict(STATE), map=tmp_path / "map.toml")

    assert of_kind(result) == {"base": {"up"}}


def test_no_source_is_changed() -> None:
    before = {name: value.clone() for name, value in STATE.items()}
    weights(STATE, bfloat16(torchtitan(STATE)))

    assert all(torch.equal(value, before[name]) for name, value in STATE.items())


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("back", [False, True])
def test_a_fault_in_the_stacked_experts_of_a_layer_is_located(*, transpose: bool, back: bool) -> None:
    torch.manual_seed(0)
    names = [
        f"layers.{layer}.experts.{number}.{part}" for layer in (0, 1) for part in ("gate", "up") for number in (0, 1, 2)
    ]
    experts = {f"{name}.weight": torch.randn(6, 8) for name in names}
    stacked = {}
    for layer in (0, 1):
        of_part = [
            torch.stack([experts[f"layers.{layer}.experts.{number}.{part}.weight"] for number in (0, 1, 2)])
            for part in ("gate", "up")
        ]
        made = torch.cat(of_part, dim=1)  # gate and up of an expert, then of the next one
        stacked[f"layers.{layer}.experts.gate_up_proj"] = made.transpose(1, 2).contiguous() if transpose else made
    faulty = {name: value.clone() for name, value in stacked.items()}
    faulty["layers.1.experts.gate_up_proj"].view(-1)[50] += 1.0

    def compared(whole: State) -> WeightsComparison:
        return weights(whole, experts) if back else weights(experts, whole)

    assert compared(stacked).verdict == "equivalent"
    (found,) = compared(faulty).differences
    assert len(found.baseline) + len(found.candidate) == 7
    assert all(name.startswith("layers.1.") for name in (*found.baseline, *found.candidate))
    assert "1 of 288 elements differ" in found.message


def test_experts_in_another_order_are_named() -> None:
    torch.manual_seed(0)
    experts = {f"experts.{number}.weight": torch.randn(6, 8) for number in range(5)}
    order = (0, 2, 1, 3, 4)
    for turned in (lambda value: value, lambda value: value.t()):
        stacked = torch.stack([turned(experts[f"experts.{number}.weight"]) for number in order])
        (found,) = weights(experts, {"experts.w": stacked.contiguous()}).differences
        assert "in another order: place 1 of 5 has number 2 of them" in found.message


def test_a_layer_that_is_there_twice_is_another_model() -> None:
    more = STATE | {
        name.replace(".2.", f".{LAYERS}."): value.clone() for name, value in STATE.items() if ".layers.2." in name
    }

    for first, second, side in ((STATE, more, "baseline"), (more, STATE, "candidate")):
        result = weights(first, second)
        assert (result.verdict, result.counts()["only"]) == ("incomplete", len(more) - len(STATE))
        (found,) = {one.message for one in result.relations if one.name.endswith(".3.mlp.up_proj.weight")}
        assert found.startswith("is model.layers.2.mlp.up_proj.weight again")
        assert f"the {side} lacks it" in found


def _with_biases(state: State) -> State:
    made = torch.Generator().manual_seed(3)
    wide = {name: len(value) for name, value in state.items() if name.endswith(("q_proj.weight", "k_proj.weight"))}
    return state | {name.replace(".weight", ".bias"): torch.randn(rows, generator=made) for name, rows in wide.items()}


@pytest.mark.parametrize("back", [False, True])
def test_biases_that_are_laid_out_unlike_their_weights_are_found(*, back: bool) -> None:
    state = _with_biases(STATE)
    good = torchtitan(STATE)
    bad = dict(good)
    for name, value in state.items():
        if name.endswith(".bias"):
            at = name.removeprefix("model.").replace("self_attn.q_proj", "attention.wq")
            at = at.replace("self_attn.k_proj", "attention.wk")
            heads = HEADS if "wq" in at else GROUPS
            good[at], bad[at] = pairs(value[:, None], heads)[:, 0].contiguous(), value

    def compared(candidate: State) -> WeightsComparison:
        return weights(candidate, state) if back else weights(state, candidate)

    assert compared(good).verdict == "equivalent"
    found = compared(bad).differences
    assert {one.kind for one in found} == {"unlike"}
    assert len(found) == 2 * LAYERS
    assert all(one.name.endswith(".bias") and "its weight is another one, or laid out" in one.message for one in found)
    zeros = [
        {name: torch.zeros_like(v) if name.endswith(".bias") else v for name, v in one.items()} for one in (state, bad)
    ]
    assert weights(*zeros).verdict == "equivalent"


def test_biases_that_were_exchanged_between_modules_are_found() -> None:
    state = {name: value for name, value in _with_biases(STATE).items() if ".2." not in name}
    query = {name: value.clone() for name, value in state.items() if name.endswith("q_proj.bias")}
    state |= {name.replace("q_proj", "o_proj"): value + 1 for name, value in query.items()}
    other = {name.replace("q_proj", "wq").replace("o_proj", "wo"): value for name, value in state.items()}
    swapped = {
        name.replace("wo.b", "x.b").replace("wq.b", "wo.b").replace("x.b", "wq.b"): other[name] for name in other
    }

    assert weights(state, other).verdict == "identical"
    found = weights(state, swapped).differences
    assert {one.kind for one in found} == {"unlike"}
    assert {one.name for one in found} == {name for name in other if re.search(r"\.w[qo]\.bias", name)}


def test_tensors_in_another_shape_are_the_same_numbers() -> None:
    torch.manual_seed(0)
    patches = {"embedding.weight": torch.randn(16, 3, 4, 4), "bias": torch.randn(16)}
    for name in ("embedding.weight", "projection.weight"):
        linear = {name: patches["embedding.weight"].reshape(16, 48), "bias": patches["bias"]}
        assert of_kind(weights(patches, linear)) == {"rearranged": {name}}
        assert weights(patches, linear).verdict == "equivalent"
        result = weights(patches, bfloat16(linear))
        assert result.verdict == "equivalent"
        assert "in the shape [16, 48] (there [16, 3, 4, 4]), rounded to bfloat16" in str(result)
    turned = patches["embedding.weight"].flip(1).reshape(16, 48)
    assert weights(patches, {**patches, "embedding.weight": turned}).verdict == "diverged"


def test_a_small_factor_is_said_with_its_digits() -> None:
    (found,) = weights(STATE, STATE | {UP: STATE[UP] * (1 + 1e-6)}).differences

    assert found.message == "is the baseline's times 1.000001"


@pytest.mark.parametrize("shape", [(3000, 1, 4), (5, 7, 11), (1, 70000, 5), (3, 40000, 8)])
def test_each_matrix_of_a_stack_may_be_transposed(shape: tuple[int, ...]) -> None:
    stack = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    turned = stack.transpose(1, 2).contiguous()

    (found,) = weights({"w": stack}, {"v": turned}).relations
    assert (found.word, found.kind) == ("equivalent", "rearranged")
    assert (found.baseline, found.candidate) == (("w",), ("v",))
    if len(stack) > 1 and 1 not in shape:  # else it is rows in another order
        turned[[0, -1]] = turned[[-1, 0]]
        assert weights({"w": stack, "b": stack[0]}, {"v": turned, "b": stack[0]}).verdict == "incomplete"
