"""The state of all that a training holds as numbers and digests, which two processes can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from traindiff.core.site import canonical_path
from traindiff.core.torch_compat.training import buffers_by_name, buffers_in, parameters_by_name, parameters_in
from traindiff.run.config.training import Training
from traindiff.run.resume.held import find_held, get_state, global_generators, kind_of

Leaf = dict[str, Any]
"""`what` it is of, the `object` and its `type`, the `leaf` in it; `value`, or `digest`, `dtype`, `shape` and `zero`."""


def leaves_of(training: Training) -> list[Leaf]:
    """The state of everything but parameters and the given optimizer, on this rank.

    Reading it draws no random number and changes nothing.
    """
    found: list[Leaf] = []
    for path, buffer in buffers_by_name(training.model).items():
        found.append({"what": "buffer", "object": canonical_path(path), "type": "", "leaf": "", **_tensor(buffer)})
    for name, (get, _) in global_generators().items():
        found.append({"what": "generator", "object": name, "type": "", "leaf": "", **_digest_of(get())})
    known = {id(one) for one in (*parameters_in(training.model), *buffers_in(training.model))}
    for name, value in find_held(training).items():
        what, kind = kind_of(value), type(value).__name__
        found += [
            {"what": what, "object": name, "type": kind, "leaf": leaf, **about} for leaf, about in _of(value, known)
        ]
    return found


def _of(value: Any, known: set[int]) -> Iterator[tuple[str, Leaf]]:
    kind = kind_of(value)
    if kind == "generator":
        yield "", _digest_of(get_state(value))
    elif kind == "tensor":
        yield "", _tensor(value)
    elif kind == "counter":
        yield "", {"value": value}
    elif isinstance(value, nn.Module):
        tensors = [*parameters_by_name(value).items(), *buffers_by_name(value).items()]
        yield from ((f".{path}", _tensor(one)) for path, one in tensors if id(one) not in known)
    else:
        yield from _leaves("", value.state_dict())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Leaf]]:
    """The numbers and tensors in a state dict, with their places; anything else in it is left out."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(f"{name}.{key}", one)
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(value):
            yield from _leaves(f"{name}[{number}]", one)
    elif isinstance(value, Tensor):
        yield name, {"value": value.item()} if value.numel() == 1 and not value.is_complex() else _tensor(value)
    elif isinstance(value, (np.ndarray, np.generic)):
        yield from _leaves(name, value.tolist())
    elif isinstance(value, (bool, int, float, str)):
        yield name, {"value": value}


def _tensor(tensor: Tensor) -> Leaf:
    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    about = {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}
    if local.device.type == "meta":
        return {"digest": "", "zero": False, **about}
    flat = local.cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else flat
    digest = hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]
    return {"digest": digest, "zero": not bool(torch.count_nonzero(flat)), **about}


def _digest_of(state: Any) -> Leaf:
    if isinstance(state, Tensor):
        return _tensor(state)
    return {"digest": hashlib.sha256(repr(state).encode()).hexdigest()[:16]}
