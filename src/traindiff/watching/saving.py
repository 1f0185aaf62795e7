"""Save an origin: its frames, its tensors, and the call that made it, to be run again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from traindiff.errors import NotARecordingError
from traindiff.kernels.extent import stored_values
from traindiff.site import printable
from traindiff.taps.nested import tensors
from traindiff.watching.capturing import CapturedCall, capture
from traindiff.watching.operations import NotWritableError, Operation
from traindiff.watching.origin import Found, Origin

FORMAT = "traindiff-module"
VERSION = 1

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
    (directory / "module.json").unlink(missing_ok=True)  # of an earlier run, which had other tensors
    (directory / "frames.txt").write_text(frames, encoding="utf-8")
    call, reason = _captured(found)
    kept = _at_hand(found) if call is None else {str(number): one for number, one in call.tensors.items()}
    written = {name: one for name, tensor in kept.items() if (one := _writable(tensor)) is not None}
    save_file(written, directory / "tensors.safetensors")
    content: dict[str, Any] = {
        "format": FORMAT, "version": VERSION, "origin": asdict(origin),
        "module": None if found.call is None else found.call.kind,
        "path": None if found.call is None else found.call.path,
        "not_captured": reason,
        "call": None if call is None else _to_json(call),
    }  # fmt: skip
    (directory / "module.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return reason


def load(directory: Path) -> tuple[CapturedCall, dict[str, Any]]:
    """What `save` wrote: the call, and everything else in `module.json`.

    Raises:
        NotARecordingError: There is no call in it; the message says why.
    """
    file = directory / "module.json"
    if not file.is_file():
        raise NotARecordingError(
            f"{directory} holds no module.json. Give a directory that traindiff.watch has written when it found a NaN."
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind, version = content["format"], content["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotARecordingError(f"{file} is damaged ({error}). Watch the training again.") from None
    if kind != FORMAT or version != VERSION:
        raise NotARecordingError(
            f"{file} has format {kind} {version}; this traindiff reads {FORMAT} {VERSION}. Update traindiff."
        )
    if content["call"] is None:
        reason = printable(str(content["not_captured"]))
        raise NotARecordingError(f"{directory} holds tensors, but no module that could be run again: {reason}.")
    try:
        kept = load_file(directory / "tensors.safetensors")
        return _from_json(content["call"], kept), content
    except Exception as error:  # noqa: BLE001  safetensors has errors of its own for damaged files
        raise NotARecordingError(f"{directory} is damaged ({type(error).__name__}: {error}).") from None


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


def _from_json(content: Mapping[str, Any], kept: Mapping[str, Tensor]) -> CapturedCall:
    return CapturedCall(
        inputs=content["inputs"], weights=content["weights"], outputs=content["outputs"],
        gradients=content["gradients"], trained=content["trained"],
        operations=[Operation.from_json(one) for one in content["operations"]],
        tensors={int(number): one for number, one in kept.items()},
    )  # fmt: skip
