"""Whether a value that was written down is of the type that an operator declares for its argument."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from traindiff.errors import type_of
from traindiff.site import printable

DTYPES: Mapping[str, torch.dtype] = {
    str(one).removeprefix("torch."): one
    for one in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
        torch.float8_e5m2, torch.float8_e5m2fnuz, torch.complex32, torch.complex64, torch.complex128, torch.int8,
        torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    )
}  # fmt: skip
LAYOUTS: Mapping[str, torch.layout] = {"strided": torch.strided}
MEMORY_FORMATS: Mapping[str, torch.memory_format] = {
    str(one).removeprefix("torch."): one
    for one in (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
}
FLOATS: Mapping[str, float] = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
"""Floats that JSON does not have, by the texts that stand for them."""

_DEVICES = frozenset({"cpu", "cuda", "meta", "mps", "npu", "xpu", "xla", "hpu"})
_LONGEST_TEXT = 40


def misfit(kind: str, value: Any, texts: Collection[str] = ()) -> str:
    """Why a value does not fit a type.

    Args:
        kind: The type, as the schema of an operator writes it, e.g. `Optional[List[int]]`.
        value: What `operations.to_json` wrote.
        texts: The texts that it may be.

    Returns:
        What the value is instead: `"1.5", not an int`. Empty where it fits.
    """
    if kind.startswith("Optional["):
        return "" if value is None else misfit(kind[len("Optional[") : -1], value, texts)
    if kind.startswith("List["):
        if not isinstance(value, list):
            return f"{_said(value)}, not a list"
        return next(filter(None, (misfit(kind[len("List[") : -1], one, texts) for one in value)), "")
    return "" if _fits(kind, value, texts) else f"{_said(value)}, not {_NAMES.get(kind, f'a {kind}')}"


_NAMES = {"int": "an integer of 64 bits", "str": "one of its words", "ScalarType": "a dtype", "Layout": "torch.strided"}


def _fits(kind: str, value: Any, texts: Collection[str]) -> bool:
    if kind == "str":
        return isinstance(value, str) and value in texts
    if kind in _NAMED:
        key, known = _NAMED[kind]
        return _entry(value, key, str) in known
    fits = _FITS.get(kind)
    return fits is not None and fits(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, bool) or _is_float(value) or _is_complex(value)


def _is_complex(value: Any) -> bool:
    parts = _entry(value, "complex", list)
    return parts is not None and len(parts) == 2 and all(map(_is_float, parts))


def _is_float(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float) or _entry(value, "float", str) in FLOATS


def _is_int(value: Any) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _entry(value: Any, key: str, kind: type) -> Any:
    """The content of an object that has this key alone; None of anything else."""
    if isinstance(value, dict) and len(value) == 1 and type(content := value.get(key)) is kind:
        return content
    return None


_NAMED: Mapping[str, tuple[str, Collection[str]]] = {
    "ScalarType": ("torch", DTYPES), "Layout": ("torch", LAYOUTS), "MemoryFormat": ("torch", MEMORY_FORMATS),
    "Device": ("device", _DEVICES),
}  # fmt: skip
_FITS: Mapping[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: _entry(value, "tensor", int) is not None or _is_number(value),  # torch makes one of it
    "int": _is_int, "bool": lambda value: isinstance(value, bool), "float": _is_float, "number": _is_number,
    "complex": _is_complex,
}  # fmt: skip


def _said(value: Any) -> str:
    if isinstance(value, (str, int, float)):
        text = printable(str(value)[:_LONGEST_TEXT])
        return f'"{text}"' if isinstance(value, str) else text
    if isinstance(value, dict):
        return f"an object of {printable(', '.join(map(str, value))[:_LONGEST_TEXT]) or 'nothing'}"
    return type_of(value)
