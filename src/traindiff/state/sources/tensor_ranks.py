"""Parameters that tensor parallelism has cut: put together again from the parts of all ranks, by the names of layers.

Rows of column-parallel layers, columns of row-parallel ones; in gated layers, rows of gate and of up. DeepSpeed's files
may declare it themselves (`universal_checkpoint_info`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np

from traindiff.core.untrusted.demands import quoted
from traindiff.state.dtypes import Bits
from traindiff.state.equal_bits import can_be_equal, equalities
from traindiff.state.stored import StoredTensor, unreadable

_ROWS = re.compile(
    r"""(.*\.)?(word_embeddings|output_layer|lm_head|linear_qkv|query_key_value|query|key_value|linear_q|linear_kv
        |linear_q_up_proj|linear_kv_up_proj|linear_fc1|dense_h_to_4h|q_proj|k_proj|v_proj|gate_proj|up_proj|embed_tokens)
        \.(weight|bias)\d*""",
    re.VERBOSE | re.ASCII,
)
_COLUMNS = re.compile(
    r"(.*\.)?(linear_proj|linear_fc2|attention\.dense|dense_4h_to_h|o_proj|down_proj)\.weight\d*", re.ASCII
)
_GATED = re.compile(r"(.*\.)?(linear_fc1|dense_h_to_4h)\.(weight|bias)\d*", re.ASCII)
_REPLICATED = re.compile(r"(.*\.)?(\w*norm\w*|router|position_embeddings)\.\w+|.*(norm_weight|bias)", re.ASCII)
_EITHER = re.compile(r"(.*\.)?(lm_head|embed_tokens)\.weight", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a parameter is cut among tensor ranks.

    Attributes:
        dim: The dim that is cut; None for copies.
        blocks: In how many equal blocks of that dim, each of which is cut.
        is_certain: Whether parts are not copies after all, or copies may differ a little (norms that drifted apart).
    """

    dim: int | None
    blocks: int = 1
    is_certain: bool = True


Rule = Callable[[str], Cut]
"""The cut of a parameter, by its name."""


def by_name(name: str, *, gated: bool) -> Cut:
    """The cut that layers of this name have in Megatron, and in DeepSpeed's automatic tensor parallelism."""
    if _ROWS.fullmatch(name):
        blocks = 2 if gated and _GATED.fullmatch(name) else 1
        return Cut(dim=0, blocks=blocks, is_certain=not _EITHER.fullmatch(name))
    if _COLUMNS.fullmatch(name):
        return Cut(dim=1)
    return Cut(dim=None, is_certain=bool(_REPLICATED.fullmatch(name)))


def declared_rule(content: Any, where: str) -> Rule | None:
    """The cuts that a file of DeepSpeed declares; None if it declares none."""
    info = content.get("universal_checkpoint_info") if isinstance(content, Mapping) else None
    if not isinstance(info, Mapping) or not info:
        return None
    kinds: dict[str, list[re.Pattern[str]]] = {}
    for kind in _DECLARED:
        given = info.get(kind)
        listed = given if isinstance(given, list | tuple) else list(given) if isinstance(given, Mapping) else []
        if kind == "parameter_with_sub_params":
            listed = [one for entry in listed for one in _patterns_of(entry)]
        kinds[kind] = [_expression(one) for one in listed if isinstance(one, str)]

    def rule(name: str) -> Cut:
        def is_one(kind: str) -> bool:
            return any(one.fullmatch(name) for one in kinds[kind])

        if is_one("parameter_with_sub_params") or is_one("autotp_unsupported_parameter_patterns"):
            raise unreadable(where, f"{quoted(name)} is cut in a way of its own, which cannot be merged")
        if is_one("tp_replicated_parameter_patterns") or is_one("parameter_to_average_patterns"):
            return Cut(dim=None)
        if is_one("parameter_with_row_parallelism_patterns"):
            return Cut(dim=1)
        return Cut(dim=0, blocks=2 if is_one("parameter_with_2_sub_params_cat_dim_0") else 1)

    return rule


_DECLARED = (
    "parameter_with_sub_params", "autotp_unsupported_parameter_patterns", "tp_replicated_parameter_patterns",
    "parameter_to_average_patterns", "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0",
)  # fmt: skip


def _patterns_of(entry: Any) -> Sequence[Any]:
    patterns = entry.get("patterns") if isinstance(entry, Mapping) else None
    return patterns if isinstance(patterns, list | tuple) else ()


def _expression(pattern: str) -> re.Pattern[str]:
    r"""What a pattern of a file means: a name in which `\d+` is a number. No other expression of a stranger is run."""
    plain = pattern.removeprefix("^").removesuffix("$").replace(r"[0-9]+", r"\d+")
    parts = [re.sub(r"\\(.)", r"\1", part) for part in plain.split(r"\d+")]
    return re.compile(r"\d{1,9}".join(map(re.escape, parts)), re.ASCII)


def over_ranks(
    name: str, parts: Sequence[StoredTensor], files: Sequence[str], cut: Cut, notes: list[str]
) -> StoredTensor:
    """One parameter from what the tensor ranks hold of it.

    Args:
        name: Its name.
        parts: By rank.
        files: By rank, for messages.
        cut: How it is cut.
        notes: Gets a warning if copies differ.

    Raises:
        CheckpointError: The parts do not fit together, or they are no copies, and how they are cut is not known.
    """
    first = parts[0]
    if len(parts) == 1 or not first.shape:
        return first
    is_cut = cut.dim is not None and cut.dim < len(first.shape)
    apart = None if is_cut and cut.is_certain else _apart(parts, files)
    if is_cut and (cut.is_certain or apart is not None):
        return _joined(parts, cut.dim or 0, cut.blocks, files[0])
    if apart is None:
        return first
    if not cut.is_certain:
        raise unreadable(apart, f"{quoted(name)} is not that of {files[0]}, and how it is cut is not known")
    notes.append(f"Warning: {name} is another one in {apart} than in {files[0]}; that of the first is compared.")
    return first


def _apart(parts: Sequence[StoredTensor], files: Sequence[str]) -> str | None:
    """The first file that holds another copy than the first one; None if all are the same."""
    for other, file in zip(parts[1:], files[1:], strict=True):
        if not can_be_equal(parts[0], other) or equalities([(parts[0], other)]) != ["exact"]:
            return file
    return None


def _joined(parts: Sequence[StoredTensor], dim: int, blocks: int, where: str) -> StoredTensor:
    """A tensor of which each rank has a part along a dim, in each of equal blocks of it.

    Raises:
        CheckpointError: The parts do not fit together.
    """
    first = parts[0]
    ranks = {len(one.shape) for one in parts}
    rest = {(one.dtype, one.shape[:dim], one.shape[dim + 1 :]) for one in parts}
    if len(ranks) > 1 or len(rest) > 1 or any(one.shape[dim] % blocks for one in parts):
        raise unreadable(where, f"the parts of {quoted(first.name)} on the tensor ranks do not fit together")
    lengths = [one.shape[dim] // blocks for one in parts]
    shape = (*first.shape[:dim], blocks * sum(lengths), *first.shape[dim + 1 :])

    def of_rows(begin: int, end: int) -> Bits:
        pairs = list(zip(parts, lengths, strict=True))
        spans = [(one, block * length, length) for block in range(blocks) for one, length in pairs]
        starts = accumulate((length for _, _, length in spans), initial=0)
        found = []
        for (one, own, length), start in zip(spans, starts, strict=False):
            low, high = max(begin, start), min(end, start + length)
            if low < high:
                found.append(one.slab(own + low - start, own + high - start))
        return np.concatenate(found)

    def of_columns(begin: int, end: int) -> Bits:
        slabs = []
        for one in parts:
            rows = (end - begin) * prod(one.shape[1:dim])
            slabs.append(one.slab(begin, end).reshape(rows, blocks, -1))
        return np.concatenate(slabs, axis=2).reshape(-1)

    return replace(first, shape=shape, parts=(), memory=of_columns if dim else of_rows, made_of=tuple(parts))
