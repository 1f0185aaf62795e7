"""Save an origin: its frames, its tensors, and the call that made it, to be run again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from traindiff.errors import RecordingError
from traindiff.kernels.extent import stored_values
from traindiff.taps.nested import tensors
from traindiff.watching.capturing import CapturedCall, capture
from traindiff.watching.operations import NotWritableError
from traindiff.watching.origin import Found, Origin
from traindiff.watching.saved_call import (
    FORMAT,
    MODULE_FILE,
    MOST_TENSOR_BYTES,
    TENSORS_FILE,
    VERSION,
    call_of,
    read_content,
)

_LARGEST_BYTES = 8 << 30
"""A module whose parameters and inputs take more is not copied to be captured."""


def save(directory: Path, found: Found, origin: Origin, frames: str) -> str:
    """Write an origin into a directory: `frames.txt`, `module.json` and `tensors.safetensors`.

    Returns:
        Why `traindiff replay` cannot run it again; empty where it can.

    Raises:
        OSError: It cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / MODULE_FILE).unlink(missing_ok=True)  # of an earlier run, which had other tensors
    (directory / "frames.txt").write_text(frames, encoding="utf-8")
    call, reason = _captured(found)
    content: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "origin": asdict(origin),
        "module": None if found.call is None else found.call.kind,
        "path": None if found.call is None else found.call.path,
        "not_captured": reason,
        "call": None if call is None else _to_json(call),
    }  # fmt: skip
    written = _written({} if call is None else {str(number): one for number, one in call.tensors.items()})
    text = json.dumps(content, indent=1)
    if call is not None and (reason := _refused(text, call, written)):
        call, text = None, json.dumps({**content, "not_captured": reason, "call": None}, indent=1)
    save_file(_written(_at_hand(found)) if call is None else written, directory / TENSORS_FILE)
    (directory / MODULE_FILE).write_text(text, encoding="utf-8")
    return reason


def _written(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: one for name, tensor in kept.items() if (one := _writable(tensor)) is not None}


def _refused(text: str, call: CapturedCall, written: Mapping[str, Tensor]) -> str:
    """Why `traindiff replay` would refuse a call; empty where it takes it."""
    for number, tensor in call.tensors.items():
        one = written.get(str(number))
        if one is None or (one.dtype, one.shape) != (tensor.dtype, tensor.shape):
            return f"a tensor of {tensor.dtype} of shape {tuple(tensor.shape)} cannot be saved as it is"
    if (size := sum(one.numel() * one.element_size() for one in written.values())) > MOST_TENSOR_BYTES:
        return f"its tensors have {size / 2**30:.1f} GiB, and may have {MOST_TENSOR_BYTES >> 30}"
    try:
        content = read_content(text.encode(), "the call")
        call_of(content["call"], {int(name): one for name, one in written.items()}, where="the call")
    except RecordingError as error:
        return str(error).rstrip(".")
    return ""


def _captured(found: Found) -> tuple[CapturedCall | None, str]:
    """The call, or why there is none."""
    if found.call is None:
        return None, "no single module made it"
    if found.arguments is None:
        return None, "what the module was given was no longer in memory; watch(keep_inputs=True) keeps it"
    args, kwargs = found.arguments
    module = found.call.module
    given = [one for _, one in tensors((list(args), dict(kwargs)), "")]
    size = sum(one.numel() * one.element_size() for one in (*module.parameters(), *module.buffers(), *given))
    if size > _LARGEST_BYTES:
        return None, f"the module and its inputs have {size / 2**30:.1f} GiB, and copying them may not fit into memory"
    try:
        return capture(module, args, kwargs, gradients=found.gradients, random_state=found.random_state), ""
    except NotWritableError as error:
        return None, str(error)


def _at_hand(found: Found) -> dict[str, Tensor]:
    """The tensors of a call that cannot be captured, by slot."""
    kept = dict(found.tensors)
    if found.call is not None:
        kept |= {f"weight {name}": one for name, one in found.call.module.named_parameters(recurse=False)}
    if found.arguments is not None:
        kept |= {f"input{slot}": one for slot, one in tensors(found.arguments, "")}
    return kept | {f"grad {slot}": one for slot, one in found.gradients.items()}


def _writable(tensor: Tensor) -> Tensor | None:
    """A copy on the CPU that a file can hold; None of what cannot be read."""
    try:
        with torch.no_grad():
            local = tensor.detach()
            if local.is_complex() or local.layout != torch.strided or hasattr(local, "to_local") or local.is_nested:
                local = torch.view_as_real(local) if local.is_complex() else stored_values(local)
            return local.cpu().contiguous().clone()
    except Exception:  # noqa: BLE001  whatever it is, the others are saved
        return None


def _to_json(call: CapturedCall) -> dict[str, Any]:
    return {
        "inputs": call.inputs, "weights": call.weights, "outputs": call.outputs, "gradients": call.gradients,
        "trained": call.trained,
        "operations": [one.to_json() for one in call.operations],
    }  # fmt: skip
