"""Maps that traindiff has, by name (`llama:hf-torchtitan`), and those of users, by path.

Names follow public descriptions of these layouts: transformers' models, torchtitan's llama3 and qwen3, Megatron core's
GPT (with norms of its own, and with norms that Transformer Engine fuses into the next layer), nanoGPT, and nanochat.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from traindiff.core.maps.entries import Entry, Layout, entries_of
from traindiff.errors import ConfigError, Problem

_LAYER = "model.layers.{n}."
_NAME = re.compile(r"(?P<family>\w+):(?P<one>\w+)-(?P<other>\w+)(?P<options>(,\w+=\d{1,6})*)")

_LLAMA_TO_TITAN = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",  # before torchtitan 0.3
    f"{_LAYER}input_layernorm.weight": "layers.{n}.attention_norm.weight",
    f"{_LAYER}post_attention_layernorm.weight": "layers.{n}.ffn_norm.weight",
    f"{_LAYER}self_attn.o_proj.weight": "layers.{n}.attention.wo.weight",
    f"{_LAYER}mlp.gate_proj.weight": "layers.{n}.feed_forward.w1.weight",
    f"{_LAYER}mlp.up_proj.weight": "layers.{n}.feed_forward.w3.weight",
    f"{_LAYER}mlp.down_proj.weight": "layers.{n}.feed_forward.w2.weight",
}
_QUERY_AND_KEY = {
    f"{_LAYER}self_attn.q_proj.weight": "layers.{n}.attention.wq.weight",
    f"{_LAYER}self_attn.k_proj.weight": "layers.{n}.attention.wk.weight",
}
_QUERY_AND_KEY_SINCE_0_3 = {
    f"{_LAYER}self_attn.q_proj.weight": "layers.{n}.attention.qkv_linear.wq.weight",
    f"{_LAYER}self_attn.k_proj.weight": "layers.{n}.attention.qkv_linear.wk.weight",
}
_EXPERTS = "layers.{n}.moe.routed_experts.inner_experts."
_MIXTRAL_EXPERTS = {
    f"{_LAYER}block_sparse_moe.gate.weight": "layers.{n}.moe.router.gate.weight",
    f"{_LAYER}block_sparse_moe.experts.{{m}}.w1.weight": f"{_EXPERTS}w1_EFD",
    f"{_LAYER}block_sparse_moe.experts.{{m}}.w2.weight": f"{_EXPERTS}w2_EDF",
    f"{_LAYER}block_sparse_moe.experts.{{m}}.w3.weight": f"{_EXPERTS}w3_EFD",
}
_QWEN_EXPERTS = {
    f"{_LAYER}mlp.gate.weight": "layers.{n}.moe.router.gate.weight",
    f"{_LAYER}mlp.experts.{{m}}.gate_proj.weight": f"{_EXPERTS}w1_EFD",
    f"{_LAYER}mlp.experts.{{m}}.down_proj.weight": f"{_EXPERTS}w2_EDF",
    f"{_LAYER}mlp.experts.{{m}}.up_proj.weight": f"{_EXPERTS}w3_EFD",
}
"""torchtitan has one tensor for all experts of a layer."""
_VALUE = (
    (f"{_LAYER}self_attn.v_proj.weight", "layers.{n}.attention.wv.weight"),
    (f"{_LAYER}self_attn.v_proj.weight", "layers.{n}.attention.qkv_linear.wv.weight"),
)
"""Before torchtitan 0.3, and since."""

_QWEN_TO_TITAN = {
    **_QWEN_EXPERTS,
    f"{_LAYER}self_attn.q_norm.weight": "layers.{n}.attention.q_norm.weight",
    f"{_LAYER}self_attn.k_norm.weight": "layers.{n}.attention.k_norm.weight",
}

_MEGATRON = "decoder.layers.{n}."
_TO_MEGATRON = {
    "model.embed_tokens.weight": "embedding.word_embeddings.weight",
    "model.norm.weight": "decoder.final_layernorm.weight",
    "lm_head.weight": "output_layer.weight",
    f"{_LAYER}self_attn.o_proj.weight": f"{_MEGATRON}self_attention.linear_proj.weight",
    f"{_LAYER}self_attn.q_norm.weight": f"{_MEGATRON}self_attention.q_layernorm.weight",
    f"{_LAYER}self_attn.k_norm.weight": f"{_MEGATRON}self_attention.k_layernorm.weight",
    f"{_LAYER}mlp.down_proj.weight": f"{_MEGATRON}mlp.linear_fc2.weight",
    f"{_LAYER}block_sparse_moe.gate.weight": f"{_MEGATRON}mlp.router.weight",
    f"{_LAYER}block_sparse_moe.experts.{{m}}.w2.weight": (
        f"{_MEGATRON}mlp.experts.local_experts.{{m}}.linear_fc2.weight"
    ),
}
_MEGATRON_NORMS = (
    (f"{_LAYER}input_layernorm.weight", f"{_MEGATRON}input_layernorm.weight"),
    (f"{_LAYER}input_layernorm.weight", f"{_MEGATRON}self_attention.linear_qkv.layer_norm_weight"),
    (f"{_LAYER}post_attention_layernorm.weight", f"{_MEGATRON}pre_mlp_layernorm.weight"),
    (f"{_LAYER}post_attention_layernorm.weight", f"{_MEGATRON}mlp.linear_fc1.layer_norm_weight"),
)
"""Norms of their own, or fused into the next layer: a model has one of the two."""

_TO_NANOCHAT = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "lm_head.weight": "lm_head.weight",
    f"{_LAYER}self_attn.q_proj.weight": "transformer.h.{n}.attn.c_q.weight",
    f"{_LAYER}self_attn.k_proj.weight": "transformer.h.{n}.attn.c_k.weight",
    f"{_LAYER}self_attn.v_proj.weight": "transformer.h.{n}.attn.c_v.weight",
    f"{_LAYER}self_attn.o_proj.weight": "transformer.h.{n}.attn.c_proj.weight",
    f"{_LAYER}mlp.fc1.weight": "transformer.h.{n}.mlp.c_fc.weight",
    f"{_LAYER}mlp.fc2.weight": "transformer.h.{n}.mlp.c_proj.weight",
}

_GPT2_LINEAR = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")


def _one(baseline: str, candidate: str, **layout: object) -> Entry:
    return _fused((baseline,), candidate, **layout)


def _fused(baseline: tuple[str, ...], candidate: str, **layout: object) -> Entry:
    made = {"heads": (0,) * len(baseline), "order": tuple(range(len(baseline))), **layout}
    return Entry(baseline=baseline, candidate=(candidate,), layout=Layout(**made), is_optional=True)  # type: ignore[arg-type]


def _renamed(names: Mapping[str, str]) -> Iterator[Entry]:
    return (_one(*pair) for pair in names.items())


def _llama_to_titan(heads: int, kv_heads: int) -> Iterator[Entry]:
    """In torchtitan's llama3, rotary embeddings turn interleaved pairs; in transformers, halves of a head."""
    yield from _renamed(_LLAMA_TO_TITAN)
    yield from (_one(*pair) for pair in _VALUE)
    for names in (_QUERY_AND_KEY, _QUERY_AND_KEY_SINCE_0_3):
        for (baseline, candidate), count in zip(names.items(), (heads, kv_heads), strict=True):
            yield _one(baseline, candidate, heads=(count,))


def _qwen_to_titan(*_: int) -> Iterator[Entry]:
    """In torchtitan, qwen3 rotates halves, as transformers does."""
    yield from _llama_to_titan(0, 0)
    yield from _renamed(_QWEN_TO_TITAN)


def _mixtral_to_titan(heads: int, kv_heads: int) -> Iterator[Entry]:
    """The layers of experts and the attention of torchtitan; rows change places where the number of heads is given."""
    yield from _llama_to_titan(heads, kv_heads)
    yield from _renamed(_MIXTRAL_EXPERTS)


def _to_megatron(_: int, kv_heads: int) -> Iterator[Entry]:
    """Megatron core interleaves queries, keys and values by groups of heads that share a key."""
    yield from _renamed(_TO_MEGATRON)
    yield from (_one(*pair) for pair in _MEGATRON_NORMS)
    grouped = {"join": "interleave", "groups": kv_heads} if kv_heads > 1 else {}
    for part in ("weight", "bias"):
        projections = tuple(f"{_LAYER}self_attn.{one}_proj.{part}" for one in "qkv")
        yield _fused(projections, f"{_MEGATRON}self_attention.linear_qkv.{part}", **grouped)
    gated = (f"{_LAYER}mlp.gate_proj.weight", f"{_LAYER}mlp.up_proj.weight")
    yield _fused(gated, f"{_MEGATRON}mlp.linear_fc1.weight")
    expert = f"{_LAYER}block_sparse_moe.experts.{{m}}"
    experts = f"{_MEGATRON}mlp.experts.local_experts.{{m}}.linear_fc1.weight"
    yield _fused((f"{expert}.w1.weight", f"{expert}.w3.weight"), experts)


def _gpt2_to_nanogpt(*_: int) -> Iterator[Entry]:
    """In transformers, the weights of GPT-2 are transposed (Conv1D); the names are the same."""
    for name in _GPT2_LINEAR:
        weight = f"transformer.h.{{n}}.{name}.weight"
        yield _one(weight, weight, transpose=True)


_GPT2_MEGATRON = {
    "transformer.wte.weight": "embedding.word_embeddings.weight",
    "transformer.wpe.weight": "embedding.position_embeddings.weight",
    "lm_head.weight": "output_layer.weight",
}
_GPT2_LAYER = "transformer.h.{n}."
_GPT2_MEGATRON_LINEAR = {
    "attn.c_proj": "self_attention.linear_proj", "mlp.c_fc": "mlp.linear_fc1", "mlp.c_proj": "mlp.linear_fc2",
}  # fmt: skip
_GPT2_MEGATRON_NORMS = (
    ("ln_1.", "input_layernorm."), ("ln_1.", "self_attention.linear_qkv.layer_norm_"),
    ("ln_2.", "pre_mlp_layernorm."), ("ln_2.", "mlp.linear_fc1.layer_norm_"),
)  # fmt: skip


def _gpt2_to_megatron(heads: int, _: int) -> Iterator[Entry]:
    """In transformers, all queries come before all keys and values, transposed; in Megatron core, head by head."""
    yield from _renamed(_GPT2_MEGATRON)
    grouped = {"join": "interleave", "groups": heads, "blocks": 3}
    for part in ("weight", "bias"):
        turns = part == "weight"
        yield _one(f"transformer.ln_f.{part}", f"decoder.final_layernorm.{part}")
        yield from (_one(_GPT2_LAYER + own + part, _MEGATRON + other + part) for own, other in _GPT2_MEGATRON_NORMS)
        for own, other in _GPT2_MEGATRON_LINEAR.items():
            yield _one(f"{_GPT2_LAYER}{own}.{part}", f"{_MEGATRON}{other}.{part}", transpose=turns)
        whole = f"{_MEGATRON}self_attention.linear_qkv.{part}"
        yield _one(f"{_GPT2_LAYER}attn.c_attn.{part}", whole, transpose=turns, **grouped)


_Made = Callable[[int, int], Iterator[Entry]]
_KNOWN: Mapping[str, tuple[_Made, bool]] = {
    "llama:hf-torchtitan": (_llama_to_titan, True),
    "mistral:hf-torchtitan": (_llama_to_titan, True),
    "qwen:hf-torchtitan": (_qwen_to_titan, False),
    "mixtral:hf-torchtitan": (_mixtral_to_titan, False),
    "llama:hf-megatron": (_to_megatron, True),
    "mistral:hf-megatron": (_to_megatron, True),
    "qwen:hf-megatron": (_to_megatron, True),
    "mixtral:hf-megatron": (_to_megatron, True),
    "gpt2:hf-nanogpt": (_gpt2_to_nanogpt, False),
    "gpt2:hf-megatron": (_gpt2_to_megatron, True),
    "nanochat:hf-nanochat": (lambda *_: _renamed(_TO_NANOCHAT), False),
}
"""By name: the function that makes the entries, and whether they depend on the number of heads."""

NAMES = tuple(_KNOWN)
"""Names of the maps, from the first layout to the second; the other way around, exchange the two."""


def map_of(given: str | os.PathLike[str] | None, *, elements: bool = False) -> Sequence[Entry]:
    """The entries of a map; none if none was given.

    Args:
        given: Path of a file, or a name of `NAMES`, perhaps with `,heads=32,kv_heads=8`.
        elements: Whether tensors are put together as the map says, so that it must know the number of heads.

    Raises:
        ConfigError: There is no such map, or it lacks the number of heads.
    """
    if given is None:
        return ()
    text = os.fspath(given)
    named = _NAME.fullmatch(text)
    if named is None or os.path.lexists(text):
        return entries_of(given)
    family, one, other = named["family"], named["one"], named["other"]
    turned = f"{family}:{one}-{other}" not in _KNOWN
    name = f"{family}:{other}-{one}" if turned else f"{family}:{one}-{other}"
    if name not in _KNOWN:
        raise ConfigError("--map", [Problem.unknown_name(where="--map", kind="a map", found=text, known=NAMES)])
    options = dict(option.split("=") for option in named["options"].split(",")[1:])
    heads = int(options.get("heads", 0))
    kv_heads = int(options.get("kv_heads", heads))
    make, needs_heads = _KNOWN[name]
    wrong = sorted(options.keys() - {"heads", "kv_heads"})
    if wrong or (elements and needs_heads and not (heads and kv_heads)):
        what = f'has "{wrong[0]}", which is not known.' if wrong else "depends on the number of heads."
        fix = f"Write --map {family}:{one}-{other},heads=32,kv_heads=8, with the numbers of your model."
        raise ConfigError("--map", [Problem(where=f"--map {text}", what=what, fix=fix)])
    entries = make(heads or int(needs_heads), kv_heads or int(needs_heads))
    return [_turned(entry) for entry in entries] if turned else [*entries]


def _turned(entry: Entry) -> Entry:
    """The entry with the two sides exchanged: parts stay parts, rows of a single tensor go the other way."""
    layout = entry.layout
    if len(entry.baseline) == 1:
        back = -layout.blocks if layout.blocks != 1 else 1
        layout = replace(layout, heads=tuple(-heads for heads in layout.heads), blocks=back)
    return replace(entry, baseline=entry.candidate, candidate=entry.baseline, layout=layout)
