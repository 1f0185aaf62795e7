"""Read a saved call that a stranger may have written: everything in it is checked before any of it is run."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load, save_file
from torch import Tensor

from traindiff.core.kernels.extent import stored_values
from traindiff.core.site import printable
from traindiff.core.torch_compat.training import buffers_in, own_parameters, parameters_in
from traindiff.core.untrusted.demands import ANYTHING, TEXT, demanded, listed, mapped, nullable, parse, shaped, whole
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import CorruptRecordingError, NotARecordingError, RecordingError
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.nonfinite.allowed_operators import RefusedOperatorError, check
from traindiff.observe.torch.nonfinite.capturing import CapturedCall, capture
from traindiff.observe.torch.nonfinite.operations import NotWritableError, Operation, numbers_of
from traindiff.observe.torch.nonfinite.origin import Found, Origin
from traindiff.observe.torch.nonfinite.trail import is_inexact

FORMAT = "traindiff-module"
VERSION = 1
MODULE_FILE = "module.json"
TENSORS_FILE = "tensors.safetensors"

MOST_BYTES = 1 << 25
"""Size of `module.json` at most: some 100,000 operators."""

MOST_TENSOR_BYTES = 16 << 30
"""Size of `tensors.safetensors` at most: a module is captured up to half of it, and random draws are kept besides."""

_NUMBERS = mapped(whole(0))
_CALL = shaped(
    {
        "inputs": _NUMBERS, "weights": _NUMBERS, "outputs": _NUMBERS, "gradients": _NUMBERS,
        "trained": listed(whole(0)),
        "operations": listed(
            shaped(
                {"name": TEXT, "args": listed(ANYTHING), "output": ANYTHING},
                {"kwargs": mapped(ANYTHING), "drawn": listed(whole(0))},
            )
        ),
    }
)  # fmt: skip
_CONTENT = shaped(
    {"origin": shaped({"message": TEXT}), "module": nullable(TEXT), "path": nullable(TEXT), "call": nullable(_CALL)},
    {"not_captured": nullable(TEXT)},
)


def damaged(where: str, what: str) -> CorruptRecordingError:
    """The error for a saved call that is not as `traindiff.watch` wrote it."""
    return CorruptRecordingError(
        f"{printable(where)} is damaged: {what}. Watch the training again to save the call again."
    )


def load_call(directory: Path) -> tuple[CapturedCall, dict[str, Any]]:
    """The call that a directory holds, and everything else in its `module.json`.

    Raises:
        NotARecordingError: There is no call in it, or one with operators that are not run; the message says why.
        CorruptRecordingError: Its files are not as they were written.
    """
    folder = Folder.of(directory, refuse=damaged)
    if not os.path.lexists(directory / MODULE_FILE):
        raise NotARecordingError(
            f"{printable(str(directory))} holds no {MODULE_FILE}. Give a directory that traindiff.watch has written "
            "when it found a NaN."
        )
    content = read_content(folder.read(MODULE_FILE, limit=MOST_BYTES), str(directory / MODULE_FILE))
    if content["call"] is None:
        reason = printable(str(content.get("not_captured")))
        raise NotARecordingError(
            f"{printable(str(directory))} holds tensors, but no module that could be run again: {reason}."
        )
    path = str(directory / TENSORS_FILE)
    try:
        kept = load(folder.read(TENSORS_FILE, limit=MOST_TENSOR_BYTES))
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise damaged(path, printable(f"{type(error).__name__}: {error}")) from None
    tensors = {
        int(name): _booleans(one)
        for name, one in kept.items()
        if name.isascii() and name.isdecimal() and len(name) < 19
    }
    if len(tensors) != len(kept):
        raise damaged(path, "it holds a tensor whose name is not a number")
    return call_of(content["call"], tensors, where=str(directory / MODULE_FILE)), content


def _booleans(tensor: Tensor) -> Tensor:
    """The tensor; booleans are made of bytes that are neither 0 nor 1, which torch would count wrongly."""
    return tensor.view(torch.uint8).ne(0) if tensor.dtype == torch.bool else tensor


def read_content(data: bytes, where: str) -> dict[str, Any]:
    """What `module.json` holds, all of the types that it must have.

    Raises:
        NotARecordingError: It is of another format or version.
        CorruptRecordingError: It is damaged.
    """
    content = parse(data, where=where, refuse=damaged, most_bytes=MOST_BYTES)
    demanded(content, shaped({"format": ANYTHING, "version": ANYTHING}), where=where, refuse=damaged)
    if content["format"] != FORMAT or type(content["version"]) is not int or content["version"] != VERSION:
        found = printable(f"{content['format']} {content['version']}"[:80])
        raise NotARecordingError(
            f"{printable(where)} has format {found}; this traindiff reads {FORMAT} {VERSION}. Update traindiff."
        )
    checked: dict[str, Any] = demanded(content, _CONTENT, where=where, refuse=damaged)
    return checked


def call_of(content: Mapping[str, Any], tensors: Mapping[int, Tensor], *, where: str) -> CapturedCall:
    """The call: its operators are allowed ones, and each tensor that is named is there before it is used.

    Raises:
        NotARecordingError: It has an operator that is not run.
        CorruptRecordingError: It names a tensor that nothing has made.
    """
    call = CapturedCall(
        inputs=content["inputs"], weights=content["weights"], outputs=content["outputs"],
        gradients=content["gradients"], trained=content["trained"],
        operations=[Operation.from_json(one) for one in content["operations"]], tensors=dict(tensors),
    )  # fmt: skip
    for name, numbers in (
        ("inputs", call.inputs.values()), ("weights", call.weights.values()), ("gradients", call.gradients.values()),
        ("trained", call.trained),
    ):  # fmt: skip
        for number in numbers:
            if number not in tensors:
                raise damaged(where, f"its {name} name the tensor {number}, which {TENSORS_FILE} does not hold")
    if any(not is_inexact(tensors[number]) for number in call.trained):
        raise damaged(where, "it differentiates by a tensor of integers")
    known = set(tensors)
    for position, operation in enumerate(call.operations):
        try:
            check(operation)
        except RefusedOperatorError as error:
            raise NotARecordingError(
                f"{printable(where)} cannot be run again: in operation {position}, {error}. No operator was run. "
                "If it is your own, watch the training again with this traindiff; if it is somebody else's, do not "
                "trust it."
            ) from None
        used = {*numbers_of(operation.arguments), *operation.drawn}
        if not used <= known:
            missing = min(used - known)
            raise damaged(where, f"operation {position} uses the tensor {missing}, which nothing has made before")
        known.update(numbers_of(operation.output))
    missing_outputs = sorted(set(call.outputs.values()) - known)
    if missing_outputs:
        raise damaged(where, f"its outputs name the tensor {missing_outputs[0]}, which nothing has made")
    return call


_LARGEST_BYTES = 8 << 30
"""A module whose parameters and inputs take more is not copied to be captured."""


def save(directory: Path, found: Found, origin: Origin, frames: str) -> str:
    """Write an origin into a directory: `frames.txt`, `module.json` and `tensors.safetensors`.

    Returns:
        Why `traindiff rerun` cannot run it again; empty where it can.

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
    """The reason why `traindiff rerun` would refuse a call; empty if it accepts the call."""
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
    size = sum(one.numel() * one.element_size() for one in (*parameters_in(module), *buffers_in(module), *given))
    if size > _LARGEST_BYTES:
        return None, f"the module and its inputs have {size / 2**30:.1f} GiB, and copying them may not fit into memory"
    try:
        return capture(module, args, kwargs, gradients=found.gradients, random_state=found.call.random_state), ""
    except NotWritableError as error:
        return None, str(error)


def _at_hand(found: Found) -> dict[str, Tensor]:
    """The tensors of a call that cannot be captured, by slot."""
    kept = dict(found.tensors)
    if found.call is not None:
        kept |= {f"weight {name}": one for name, one in own_parameters(found.call.module).items()}
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
