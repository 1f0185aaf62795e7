"""Takes tensors of Megatron's distributed checkpoints apart: they have one for all layers, and for all experts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod

from traindiff.core.untrusted.folder import Folder
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.stored import Part, Place, StoredTensor

_DECLARED = "metadata.json"
_MOST_DECLARED_BYTES = 1 << 16
_MOST_STACKED = 1 << 12
"""A tensor of more layers or experts stays as it is."""

_LAYERS = re.compile(r"((?:.*\.)?layers\.)(?!\d)(.+)", re.ASCII)
_EXPERTS = re.compile(r"((?:.*\.)?experts\.)experts\.(linear_fc[12]\..+)", re.ASCII)
_BUCKET = re.compile(r"(?:.*\.)?gbuf_idx_\d+\..+", re.ASCII)


def is_of_megatron(folder: Folder) -> bool:
    """True if Megatron has written the directory, as a file of it says."""
    names = folder.names()
    return _DECLARED in names and b'"sharded_backend"' in folder.read(_DECLARED, limit=_MOST_DECLARED_BYTES)


def without_buckets(tensors: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors without those of buckets that hold the optimizer's state of many parameters, and a note on them."""
    found = {name: one for name, one in tensors.items() if not _BUCKET.fullmatch(name)}
    if len(found) == len(tensors):
        return found, []
    told = "keeps the optimizer's state in buckets of many parameters, which no name tells apart; it is not compared."
    return found, [f"Megatron's checkpoint {told} Save it with --dist-ckpt-optim-fully-reshardable to compare it."]


def apart(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, with one for each layer and each expert, under the names that these have in the model."""
    found: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        match = _LAYERS.fullmatch(name)
        layers = _rows(tensor, match[1], match[2]) if match else [tensor]
        for layer in layers:
            expert = _EXPERTS.fullmatch(layer.name)
            for one in _rows(layer, f"{expert[1]}local_experts.", expert[2]) if expert else [layer]:
                found[one.name] = one
    return found


def _rows(tensor: StoredTensor, before: str, after: str) -> list[StoredTensor]:
    """What lies at each place of the first dim, with the number of the place in the name."""
    if not tensor.shape or tensor.shape[0] > _MOST_STACKED:
        return [tensor]
    parts: list[list[Part]] = [[] for _ in range(tensor.shape[0])]
    for part in tensor.parts:
        for number in range(part.shape[0]):
            find = cache(partial(_place, part, number, ITEM_BYTES[tensor.dtype]))
            own = Part(offset=part.offset[1:] or (0,), shape=part.shape[1:] or (1,), find=find)
            parts[part.offset[0] + number].append(own)
    return [
        replace(tensor, name=f"{before}{number}.{after}", shape=tensor.shape[1:], parts=tuple(own))
        for number, own in enumerate(parts)
    ]


def _place(part: Part, number: int, item_bytes: int) -> Place:
    """Where what lies at a place of the first dim of a part is."""
    place = part.find()
    step = prod(part.shape[1:]) if place.strides is None else place.strides[0]
    content = place.content.after(number * step * item_bytes)
    strides = None if place.strides is None or len(place.strides) == 1 else place.strides[1:]
    return replace(place, content=content, strides=strides)
