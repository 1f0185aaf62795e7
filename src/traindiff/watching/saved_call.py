"""Read a saved call that a stranger may have written: everything in it is checked before any of it is run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import load
from torch import Tensor

from traindiff.errors import CorruptRecordingError, NotARecordingError
from traindiff.site import printable
from traindiff.untrusted import ANYTHING, TEXT, Folder, demanded, listed, mapped, nullable, parse, shaped, whole
from traindiff.watching.allowed_operators import RefusedOperatorError, check
from traindiff.watching.capturing import CapturedCall
from traindiff.watching.made import is_inexact
from traindiff.watching.operations import Operation, numbers_of

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
    {"origin": shaped({"says": TEXT}), "module": nullable(TEXT), "path": nullable(TEXT), "call": nullable(_CALL)},
    {"not_captured": nullable(TEXT)},
)


def damaged(where: str, what: str) -> CorruptRecordingError:
    """The error for a saved call that is not as `traindiff.watch` wrote it."""
    return CorruptRecordingError(f"{printable(where)} is damaged: {what}. Watch the training again to replay it.")


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
                f"{printable(where)} cannot be replayed: in operation {position}, {error}. No operator was run. "
                "If it is your own, watch the training again with this traindiff; if it is somebody else's, do not "
                "trust it."
            ) from None
        used = {*numbers_of([operation.args, *operation.kwargs.values()]), *operation.drawn}
        if not used <= known:
            missing = min(used - known)
            raise damaged(where, f"operation {position} uses the tensor {missing}, which nothing has made before")
        known.update(numbers_of(operation.output))
    missing_outputs = sorted(set(call.outputs.values()) - known)
    if missing_outputs:
        raise damaged(where, f"its outputs name the tensor {missing_outputs[0]}, which nothing has made")
    return call
