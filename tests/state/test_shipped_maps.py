"""The maps that traindiff has: checkpoints made here, converted by code of their own, both ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import traindiff
from traindiff.core.maps.shipped import NAMES, map_of
from traindiff.errors import ConfigError

WIDTH, HEADS, KV_HEADS, HEAD, INNER, LAYERS, WORDS, EXPERTS = 16, 4, 2, 4, 24, 2, 20, 3
State = dict[str, Tensor]


def made(shapes: dict[str, tuple[int, ...]]) -> State:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def hf(*, biases: bool = False, norms: bool = False, experts: bool = False) -> State:
    """A checkpoint as transformers writes it."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, WIDTH), "lm_head.weight": (WORDS, WIDTH)}
    shapes["model.norm.weight"] = (WIDTH,)
    for layer in range(LAYERS):
        here = f"model.layers.{layer}"
        for one, rows in (("q", HEADS * HEAD), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD)):
            shapes[f"{here}.self_attn.{one}_proj.weight"] = (rows, WIDTH)
            if biases:
                shapes[f"{here}.self_attn.{one}_proj.bias"] = (rows,)
        shapes[f"{here}.self_attn.o_proj.weight"] = (WIDTH, HEADS * HEAD)
        if norms:
            shapes.update({f"{here}.self_attn.{one}_norm.weight": (HEAD,) for one in "qk"})
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{here}.{norm}.weight"] = (WIDTH,)
        if experts:
            shapes[f"{here}.block_sparse_moe.gate.weight"] = (EXPERTS, WIDTH)
            for expert in range(EXPERTS):
                there = f"{here}.block_sparse_moe.experts.{expert}"
                shapes |= {f"{there}.w1.weight": (INNER, WIDTH), f"{there}.w3.weight": (INNER, WIDTH)}
                shapes[f"{there}.w2.weight"] = (WIDTH, INNER)
        else:
            shapes |= {f"{here}.mlp.{one}_proj.weight": (INNER, WIDTH) for one in ("gate", "up")}
            shapes[f"{here}.mlp.down_proj.weight"] = (WIDTH, INNER)
    return made(shapes)


def as_pairs(weight: Tensor, heads: int) -> Tensor:
    """The rows of heads that rotate halves, as those that rotate pairs."""
    return weight.view(heads, 2, weight.shape[0] // heads // 2, -1).transpose(1, 2).reshape(weight.shape)


def torchtitan(state: State, *, rotates_pairs: bool = True) -> State:
    names = {
        "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm", "model.layers": "layers",
        "self_attn": "attention", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo",
        "mlp": "feed_forward", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    found = {}
    for name, tensor in state.items():
        value = tensor
        if rotates_pairs and ("q_proj" in name or "k_proj" in name):
            value = as_pairs(tensor, HEADS if "q_proj" in name else KV_HEADS)
        for own, other in names.items():
            name = name.replace(own, other)  # noqa: PLW2901
        found[name] = value
    return found


def torchtitan_since_0_3(state: State, *, rotates_pairs: bool) -> State:
    """With the names of its attention and head since version 0.3, and all experts of a layer in one tensor."""
    found: State = {}
    stacked: dict[str, list[Tensor]] = {}
    names = {"w1": "w1_EFD", "w2": "w2_EDF", "w3": "w3_EFD", "gate_proj": "w1_EFD", "down_proj": "w2_EDF"}
    for name, tensor in state.items():
        layer = name.split(".")[2] if "layers" in name else ""
        if ".experts." in name:
            kind = name.split(".")[-2]
            whole = f"layers.{layer}.moe.routed_experts.inner_experts.{names.get(kind, 'w3_EFD')}"
            stacked.setdefault(whole, []).append(tensor)
        elif name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight")):
            found[f"layers.{layer}.moe.router.gate.weight"] = tensor
        elif name == "lm_head.weight":
            found[name] = tensor
        else:
            for other, value in torchtitan({name: tensor}, rotates_pairs=rotates_pairs).items():
                for one in ("wq", "wk", "wv"):
                    other = other.replace(f"attention.{one}", f"attention.qkv_linear.{one}")  # noqa: PLW2901
                found[other] = value
    return found | {name: torch.stack(parts) for name, parts in stacked.items()}


def megatron(state: State, *, fused_norms: bool = False) -> State:
    found = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "output_layer.weight": state["lm_head.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    for layer in range(LAYERS):
        own, here = f"model.layers.{layer}", f"decoder.layers.{layer}"
        for part in ("weight", "bias"):
            if f"{own}.self_attn.q_proj.{part}" in state:
                parts = [state[f"{own}.self_attn.{one}_proj.{part}"] for one in "qkv"]
                groups = [one.view(KV_HEADS, -1, *one.shape[1:]) for one in parts]
                found[f"{here}.self_attention.linear_qkv.{part}"] = torch.cat(groups, 1).flatten(0, 1)
        found[f"{here}.self_attention.linear_proj.weight"] = state[f"{own}.self_attn.o_proj.weight"]
        for one in "qk":
            if f"{own}.self_attn.{one}_norm.weight" in state:
                found[f"{here}.self_attention.{one}_layernorm.weight"] = state[f"{own}.self_attn.{one}_norm.weight"]
        norms = state[f"{own}.input_layernorm.weight"], state[f"{own}.post_attention_layernorm.weight"]
        places = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if not fused_norms:
            places = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        found.update({f"{here}.{place}": norm for place, norm in zip(places, norms, strict=True)})
        if f"{own}.mlp.gate_proj.weight" in state:
            gated = [state[f"{own}.mlp.{one}_proj.weight"] for one in ("gate", "up")]
            found[f"{here}.mlp.linear_fc1.weight"] = torch.cat(gated)
            found[f"{here}.mlp.linear_fc2.weight"] = state[f"{own}.mlp.down_proj.weight"]
            continue
        found[f"{here}.mlp.router.weight"] = state[f"{own}.block_sparse_moe.gate.weight"]
        for expert in range(EXPERTS):
            w1, w2, w3 = (state[f"{own}.block_sparse_moe.experts.{expert}.w{one}.weight"] for one in (1, 2, 3))
            there = f"{here}.mlp.experts.local_experts.{expert}"
            found |= {f"{there}.linear_fc1.weight": torch.cat([w1, w3]), f"{there}.linear_fc2.weight": w2}
    return found


def gpt2() -> State:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (WORDS, WIDTH), "lm_head.weight": (WORDS, WIDTH)}
    for layer in range(LAYERS):
        here = f"transformer.h.{layer}"
        for name, inner, outer in (
            ("attn.c_attn", WIDTH, 3 * WIDTH), ("attn.c_proj", WIDTH, WIDTH), ("mlp.c_fc", WIDTH, INNER),
            ("mlp.c_proj", INNER, WIDTH),
        ):  # fmt: skip
            shapes |= {f"{here}.{name}.weight": (inner, outer), f"{here}.{name}.bias": (outer,)}
    return made(shapes)


def gpt2_of_megatron(state: State, *, fused_norms: bool) -> State:
    """Of Megatron core, which has the queries, keys and values of each head together."""
    heads, found = HEADS, {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }  # fmt: skip
    norms = {"ln_1": "input_layernorm.", "ln_2": "pre_mlp_layernorm."}
    if fused_norms:
        norms = {"ln_1": "self_attention.linear_qkv.layer_norm_", "ln_2": "mlp.linear_fc1.layer_norm_"}
    linear = {"attn.c_proj": "self_attention.linear_proj", "mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2"}
    for part in ("weight", "bias"):
        found[f"decoder.final_layernorm.{part}"] = state[f"transformer.ln_f.{part}"]
        for layer in range(LAYERS):
            own, here = f"transformer.h.{layer}", f"decoder.layers.{layer}"
            for norm, other in norms.items():
                found[f"{here}.{other}{part}"] = state[f"{own}.{norm}.{part}"]
            for name, other in linear.items():
                tensor = state[f"{own}.{name}.{part}"]
                found[f"{here}.{other}.{part}"] = tensor.t().contiguous()
            thirds = state[f"{own}.attn.c_attn.{part}"].t().reshape(3, heads, WIDTH // heads, -1)
            whole = thirds.transpose(0, 1).reshape(3 * WIDTH, -1)
            found[f"{here}.self_attention.linear_qkv.{part}"] = whole if part == "weight" else whole.reshape(-1)
    return found


def gpt2_with_norms() -> State:
    norms: dict[str, tuple[int, ...]] = {"transformer.wpe.weight": (WORDS, WIDTH)}
    places = [f"transformer.h.{layer}.ln_{one}" for layer in range(LAYERS) for one in (1, 2)]
    for place in (*places, "transformer.ln_f"):
        norms |= {f"{place}.weight": (WIDTH,), f"{place}.bias": (WIDTH,)}
    return gpt2() | made(norms)


def qwen_with_experts() -> State:
    names = {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
    found = {}
    for name, tensor in hf(norms=True, experts=True).items():
        for own, other in names.items():
            name = name.replace(own, other)  # noqa: PLW2901
        found[name] = tensor
    return found


def nanogpt(state: State) -> State:
    return {
        name: tensor.T.contiguous() if name.endswith(".weight") and ".h." in name else tensor
        for name, tensor in state.items()
    }


def nanochat(state: State) -> State:
    names = {
        "model.embed_tokens": "transformer.wte", "model.layers": "transformer.h", "self_attn": "attn",
        "q_proj": "c_q", "k_proj": "c_k", "v_proj": "c_v", "o_proj": "c_proj", "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }  # fmt: skip
    found = {}
    for name, tensor in state.items():
        for own, other in names.items():
            name = name.replace(own, other)  # noqa: PLW2901
        found[name] = tensor
    return found


def hf_nanochat() -> State:
    plain = {name: tensor for name, tensor in hf().items() if "norm" not in name and ".mlp." not in name}
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(LAYERS):
        here = f"model.layers.{layer}.mlp"
        shapes |= {f"{here}.fc1.weight": (INNER, WIDTH), f"{here}.fc2.weight": (WIDTH, INNER)}
    return plain | made(shapes)


HEADS_TEXT = f",heads={HEADS},kv_heads={KV_HEADS}"
CASES: dict[str, tuple[str, State, Callable[[State], State]]] = {
    "Llama in torchtitan before 0.3": (f"llama:hf-torchtitan{HEADS_TEXT}", hf(), torchtitan),
    "Llama in torchtitan": (
        f"llama:hf-torchtitan{HEADS_TEXT}", hf(), lambda state: torchtitan_since_0_3(state, rotates_pairs=True),
    ),
    "Mistral in torchtitan": (f"mistral:hf-torchtitan{HEADS_TEXT}", hf(), torchtitan),
    "Qwen in torchtitan before 0.3": (
        "qwen:hf-torchtitan", hf(norms=True), lambda state: torchtitan(state, rotates_pairs=False),
    ),
    "Qwen in torchtitan": (
        "qwen:hf-torchtitan", hf(norms=True), lambda state: torchtitan_since_0_3(state, rotates_pairs=False),
    ),
    "Qwen with experts in torchtitan": (
        "qwen:hf-torchtitan", qwen_with_experts(), lambda state: torchtitan_since_0_3(state, rotates_pairs=False),
    ),
    "Mixtral in torchtitan": (
        "mixtral:hf-torchtitan", hf(experts=True), lambda state: torchtitan_since_0_3(state, rotates_pairs=False),
    ),
    "Mixtral in torchtitan with rotary pairs": (
        f"mixtral:hf-torchtitan{HEADS_TEXT}", hf(experts=True),
        lambda state: torchtitan_since_0_3(state, rotates_pairs=True),
    ),
    "Llama in Megatron": (f"llama:hf-megatron{HEADS_TEXT}", hf(), megatron),
    "Mistral in Megatron": (
        f"mistral:hf-megatron{HEADS_TEXT}", hf(), lambda state: megatron(state, fused_norms=True),
    ),
    "Qwen in Megatron": (f"qwen:hf-megatron{HEADS_TEXT}", hf(biases=True, norms=True), megatron),
    "Mixtral in Megatron": (f"mixtral:hf-megatron{HEADS_TEXT}", hf(experts=True), megatron),
    "GPT-2 in nanoGPT": ("gpt2:hf-nanogpt", gpt2(), nanogpt),
    "GPT-2 in Megatron": (
        f"gpt2:hf-megatron,heads={HEADS}", gpt2_with_norms(), lambda state: gpt2_of_megatron(state, fused_norms=False),
    ),
    "GPT-2 in Megatron with fused norms": (
        f"gpt2:hf-megatron,heads={HEADS}", gpt2_with_norms(), lambda state: gpt2_of_megatron(state, fused_norms=True),
    ),
    "nanochat": ("nanochat:hf-nanochat", hf_nanochat(), nanochat),
}  # fmt: skip


def turned(name: str) -> str:
    layouts, comma, options = name.partition(":")[2].partition(",")
    one, other = layouts.split("-")
    return f"{name.partition(':')[0]}:{other}-{one}{comma}{options}"


def test_every_map_is_tested() -> None:
    assert {name.partition(",")[0] for name, _, _ in CASES.values()} == {*NAMES}


@pytest.mark.parametrize("case", CASES)
def test_a_converted_checkpoint_is_the_same_model(case: str) -> None:
    name, state, convert = CASES[case]

    found = traindiff.weights(state, convert(state), map=name)

    assert found.verdict == "identical", str(found)
    assert not found.notes
    assert all(len(one.baseline) == 1 for one in found.relations)
    assert {one.role for one in found.relations} == {"parameter"}
    assert len(found.relations) == len(convert(state))


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_same_model_the_other_way_around(case: str) -> None:
    name, state, convert = CASES[case]

    found = traindiff.weights(convert(state), state, map=turned(name))

    assert found.verdict == "identical", str(found)
    assert not found.notes


@pytest.mark.parametrize("case", CASES)
def test_another_number_in_a_converted_tensor_is_found(case: str) -> None:
    name, state, convert = CASES[case]
    other = {key: tensor.clone() for key, tensor in convert(state).items()}
    changed = max(other, key=lambda key: other[key].numel() if "ayers" in key or ".h." in key else 0)
    other[changed][-1] *= 1.5

    found = traindiff.weights(state, other, map=name)

    assert found.verdict == "diverged"
    assert [one.candidate for one in found.relations if one.word == "differs"] == [(changed,)]


def test_weights_that_were_not_permuted_for_the_other_rotation_are_found() -> None:
    state = hf()

    found = traindiff.weights(
        state, torchtitan(state, rotates_pairs=False), map=f"llama:hf-torchtitan{HEADS_TEXT}"
    )  # fmt: skip

    assert found.verdict == "diverged"
    assert {one.candidate[0].rpartition(".attention.")[2] for one in found.relations if one.word == "differs"} == {
        "wq.weight",
        "wk.weight",
    }


def test_a_map_that_needs_the_number_of_heads_says_so() -> None:
    with pytest.raises(ConfigError, match="depends on the number of heads"):
        traindiff.weights(hf(), torchtitan(hf()), map="llama:hf-torchtitan")


def test_without_elements_no_number_of_heads_is_needed() -> None:
    assert len(map_of("llama:hf-torchtitan")) > 5


@pytest.mark.parametrize(
    ("name", "message"), [("llama:hf-megatrom", "Did you mean"), ("llama:hf-megatron,head=3", '"head"')]
)
def test_an_unknown_map_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        map_of(name)
