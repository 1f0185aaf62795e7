"""State dicts of a small transformer, in the layouts of several libraries. Its heads are grouped."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LAYERS, HEADS, GROUPS, HEAD, HIDDEN, VOCABULARY = 3, 4, 2, 16, 96, 200
WIDTH = HEADS * HEAD

State = dict[str, Tensor]


def hugging_face(seed: int = 0) -> State:
    """As transformers names a Llama; float32, rotary halves."""
    made = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=made) * 0.02

    state = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        state |= {
            f"{at}.self_attn.q_proj.weight": matrix(WIDTH, WIDTH),
            f"{at}.self_attn.k_proj.weight": matrix(GROUPS * HEAD, WIDTH),
            f"{at}.self_attn.v_proj.weight": matrix(GROUPS * HEAD, WIDTH),
            f"{at}.self_attn.o_proj.weight": matrix(WIDTH, WIDTH),
            f"{at}.mlp.gate_proj.weight": matrix(HIDDEN, WIDTH),
            f"{at}.mlp.up_proj.weight": matrix(HIDDEN, WIDTH),
            f"{at}.mlp.down_proj.weight": matrix(WIDTH, HIDDEN),
            f"{at}.input_layernorm.weight": torch.ones(WIDTH),
            f"{at}.post_attention_layernorm.weight": torch.ones(WIDTH),
        }
    return state | {"model.norm.weight": torch.ones(WIDTH), "lm_head.weight": matrix(VOCABULARY, WIDTH)}


def pairs(weight: Tensor, heads: int) -> Tensor:
    """Rows from rotary halves to interleaved pairs, the inverse of transformers' `permute` for Llama."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


_TORCHTITAN = {
    "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.": "", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def torchtitan(state: Mapping[str, Tensor]) -> State:
    """As torchtitan names it, with rotary pairs."""
    made = {}
    for name, value in state.items():
        heads = HEADS if "q_proj" in name else GROUPS if "k_proj" in name else 0
        other = name
        for old, new in _TORCHTITAN.items():
            other = other.replace(old, new)
        made[other] = pairs(value, heads) if heads else value
    return made


def megatron(state: Mapping[str, Tensor]) -> State:
    """As Megatron names it: queries, keys and values interleaved by group, gate and up one after the other."""
    made = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    for layer in range(LAYERS):
        old, new = f"model.layers.{layer}", f"decoder.layers.{layer}"
        query, key, value = (state[f"{old}.self_attn.{one}_proj.weight"].view(GROUPS, -1, WIDTH) for one in "qkv")
        made |= {
            f"{new}.self_attention.linear_qkv.weight": torch.cat([query, key, value], dim=1).reshape(-1, WIDTH),
            f"{new}.self_attention.linear_proj.weight": state[f"{old}.self_attn.o_proj.weight"],
            f"{new}.mlp.linear_fc1.weight": torch.cat(
                [state[f"{old}.mlp.{one}_proj.weight"] for one in ("gate", "up")]
            ),
            f"{new}.mlp.linear_fc2.weight": state[f"{old}.mlp.down_proj.weight"],
            f"{new}.self_attention.linear_qkv.layer_norm_weight": state[f"{old}.input_layernorm.weight"],
            f"{new}.mlp.linear_fc1.layer_norm_weight": state[f"{old}.post_attention_layernorm.weight"],
        }
    return made


def bfloat16(state: Mapping[str, Tensor]) -> State:
    return {name: value.bfloat16() for name, value in state.items()}
