"""Checks of arguments that torch's operators do not check: sizes and indices that would lead outside of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from traindiff.core.site import printable
from traindiff.errors import type_of

NAMED: Mapping[str, torch.dtype | torch.layout | torch.memory_format] = {
    str(one).removeprefix("torch."): one
    for one in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz,
        torch.float8_e5m2, torch.float8_e5m2fnuz, torch.complex32, torch.complex64, torch.complex128, torch.int8,
        torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
        torch.strided, torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d,
    )
}  # fmt: skip
"""Dtypes, layouts and memory formats that an argument may be, by the texts that stand for them."""

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


def _is_named(kind: type, value: Any) -> bool:
    return isinstance(NAMED.get(_entry(value, "torch", str)), kind)


_FITS: Mapping[str, Callable[[Any], bool]] = {
    "Tensor": lambda value: _entry(value, "tensor", int) is not None or _is_number(value),  # torch makes one of it
    "int": _is_int, "bool": lambda value: isinstance(value, bool), "float": _is_float, "number": _is_number,
    "complex": _is_complex, "ScalarType": partial(_is_named, torch.dtype), "Layout": partial(_is_named, torch.layout),
    "MemoryFormat": partial(_is_named, torch.memory_format),
    "Device": lambda value: _entry(value, "device", str) in _DEVICES,
}  # fmt: skip


def _said(value: Any) -> str:
    if isinstance(value, (str, int, float)):
        text = printable(str(value)[:_LONGEST_TEXT])
        return f'"{text}"' if isinstance(value, str) else text
    if isinstance(value, dict):
        return f"an object of {printable(', '.join(map(str, value))[:_LONGEST_TEXT]) or 'nothing'}"
    return type_of(value)


Arguments = Mapping[str, Any]
"""The arguments of a call by name; those that were left out are missing."""

_LEAST_SCALE, _LARGEST_SCALE = 1e-6, 1e6


class OutOfBoundsError(Exception):
    """A call would read or write outside of its tensors; the message is a clause that says how."""


def check_bounds(name: str, arguments: Arguments) -> None:
    """Refuse a call of an operator that would read or write outside of its tensors.

    torch checks most calls itself. These operators are called by torch's own functions alone, which check for them.

    Args:
        name: Of the operator, e.g. `native_batch_norm`.
        arguments: Its arguments, tensors among them.

    Raises:
        OutOfBoundsError: It would.
    """
    found = _CHECKS.get(name)
    wrong = found(arguments) if found is not None else None
    if wrong:
        raise OutOfBoundsError(f"aten.{name} was given {wrong}")


def _batch_norm(given: Arguments) -> str | None:
    if given["input"].dim() < 2:
        return "an input without channels"
    if not given.get("training", False) and (given.get("running_mean") is None or given.get("running_var") is None):
        return "no running statistics to normalize by"
    channels = given["input"].shape[1]
    for name in ("weight", "bias", "running_mean", "running_var"):
        one = given.get(name)
        if isinstance(one, Tensor) and tuple(one.shape) != (channels,):
            return f"as {name} a tensor of shape {_shape(one)} for {channels} channels"
    return None


def _group_norm(given: Arguments) -> str | None:
    tensor, batch, channels, rest = given["input"], given["N"], given["C"], given["HxW"]
    if tensor.dim() < 2 or (batch, channels, rest) != (*tensor.shape[:2], prod(tensor.shape[2:])):
        return f"sizes {batch}, {channels} and {rest}, which are not those of its input, of shape {_shape(tensor)}"
    return None


def _ctc_loss(given: Arguments) -> str | None:
    scores, targets, lengths = given["log_probs"], given["targets"], given["target_lengths"]
    inputs, blank = given["input_lengths"], given.get("blank", 0)
    if scores.dim() != 3 or targets.dim() not in (1, 2):
        return f"scores of shape {_shape(scores)} and targets of shape {_shape(targets)}"
    steps, batch, classes = scores.shape
    lengths, inputs = _numbers(lengths), _numbers(inputs)
    if len(lengths) != batch or len(inputs) != batch or (targets.dim() == 2 and targets.shape[0] != batch):
        return f"lengths that are not those of a batch of {batch}"
    if min(inputs, default=0) < 0 or max(inputs, default=0) > steps:
        return f"lengths of inputs that are not between 0 and {steps}"
    most = targets.shape[1] if targets.dim() == 2 else targets.numel()
    needed = max(lengths, default=0) if targets.dim() == 2 else sum(lengths)
    if min(lengths, default=0) < 0 or needed > most:
        return "lengths of targets that are not those of its targets"
    if not 0 <= blank < classes or not _between(targets, 0, classes - 1):
        return f"targets that are none of its {classes} classes"
    return None


def _attention(given: Arguments) -> str | None:
    query, key, value = given["query"], given["key"], given["value"]
    shapes = f"query of shape {_shape(query)}, key of shape {_shape(key)} and value of shape {_shape(value)}"
    if not query.dim() == key.dim() == value.dim() == 4 or 0 in (*query.shape, *key.shape, *value.shape):
        return shapes
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        return shapes
    if query.shape[1] % key.shape[1]:
        return shapes
    mask = next((given[one] for one in ("attn_mask", "attn_bias") if given.get(one) is not None), None)
    if mask is not None:
        full = (*query.shape[:3], key.shape[2])
        if not 2 <= mask.dim() <= 4 or any(
            have not in (1, one) for have, one in zip(mask.shape[::-1], full[::-1], strict=False)
        ):
            return f"a mask of shape {_shape(mask)} for {shapes}"
    return None


def _fractional_pool(given: Arguments) -> str | None:
    return None if _between(given["random_samples"], 0, 1) else "random samples that are not between 0 and 1"


def _scales(given: Arguments) -> str | None:
    for name in ("scales", "scales_d", "scales_h", "scales_w"):
        scale = given.get(name)
        if scale is not None and not _LEAST_SCALE <= scale <= _LARGEST_SCALE:
            return f"the scale {scale}, which is not between {_LEAST_SCALE:g} and {_LARGEST_SCALE:g}"
    if any(not _LEAST_SCALE <= one <= _LARGEST_SCALE for one in given.get("scale_factors") or ()):
        return f"a scale that is not between {_LEAST_SCALE:g} and {_LARGEST_SCALE:g}"
    return None


def _fft(given: Arguments) -> str | None:
    tensor, axes = given["self"], given["dim"]
    if len(set(axes)) != len(axes) or not all(0 <= axis < tensor.dim() for axis in axes):
        return f"the axes {axes[:8]} of a tensor of shape {_shape(tensor)}"
    if not 0 <= given["normalization"] <= 2:
        return f"the normalization {given['normalization']}"
    size = given.get("last_dim_size")
    if size is not None and (not axes or size < 1 or tensor.shape[axes[-1]] != size // 2 + 1):
        return f"the size {size}, which a tensor of shape {_shape(tensor)} is not half of"
    return None


def _weight_norm(given: Arguments) -> str | None:
    direction, length, axis = given["v"], given["g"], given.get("dim", 0)
    if axis not in (0, direction.dim() - 1) or length.numel() != direction.shape[axis]:
        return f"lengths of shape {_shape(length)} for axis {axis} of a tensor of shape {_shape(direction)}"
    return None


def _packed(given: Arguments) -> str | None:
    tensor, lengths = given["input"], given["lengths"]
    if tensor.dim() < 2 or lengths.dim() != 1 or lengths.dtype != torch.int64 or not lengths.numel():
        return f"lengths of shape {_shape(lengths)} for a tensor of shape {_shape(tensor)}"
    axis = 1 if given["batch_first"] else 0
    if lengths.numel() != tensor.shape[1 - axis] or not _between(lengths, 1, tensor.shape[axis]):
        return f"lengths that are not between 1 and {tensor.shape[axis]}"
    return None


def _unfolded(given: Arguments) -> str | None:
    made = torch.empty(given["input_sizes"], device="meta").unfold(given["dim"], given["size"], given["step"])
    return (
        None
        if made.shape == given["grad_in"].shape
        else f"a tensor of shape {_shape(given['grad_in'])}, not {_shape(made)}"
    )


def _bags(given: Arguments) -> str | None:
    weight, indices, offsets = given["weight"], given["indices"], given["offsets"]
    if weight.dim() != 2 or indices.dim() != 1 or offsets.dim() != 1:
        shapes = (_shape(weight), _shape(indices), _shape(offsets))
        return "weights of shape {}, indices of shape {} and offsets of shape {}".format(*shapes)
    if not _between(indices, 0, weight.shape[0] - 1):
        return f"indices that are not between 0 and {weight.shape[0] - 1}"
    if not _between(offsets, 0, indices.numel()) or bool((offsets[1:] < offsets[:-1]).any()):
        return f"offsets that are not ascending from 0 to {indices.numel()}"
    scales = given.get("per_sample_weights")
    if scales is not None and scales.shape != indices.shape:
        return f"weights of samples of shape {_shape(scales)} for indices of shape {_shape(indices)}"
    return None


def _half_to_float(given: Arguments) -> str | None:
    return (
        None if given["grad_output"].shape == given["output"].shape else "a gradient of another shape than its output"
    )


def _view(given: Arguments) -> str | None:
    return _boolean(given) if "dtype" in given and given["self"].dtype != torch.bool else None


def _boolean(given: Arguments) -> str | None:
    """Booleans of other bytes than 0 and 1 are counted wrongly by what selects by them."""
    made = given.get("dtype", given["self"].dtype)
    return "a tensor of booleans that may have other bytes than 0 and 1" if made == torch.bool else None


_CHECKS: Mapping[str, Callable[[Arguments], str | None]] = {
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
                     "_batch_norm_with_update", "_batch_norm_no_update"), _batch_norm),
    **dict.fromkeys((f"_scaled_dot_product_{one}_attention{more}" for one, more in (
        ("flash", ""), ("flash", "_for_cpu"), ("efficient", ""), ("cudnn", ""))), _attention),
    **dict.fromkeys((f"upsample_{one}" for one in (
        "linear1d", "bilinear2d", "trilinear3d", "bicubic2d", "nearest1d", "nearest2d", "nearest3d")), _scales),
    **dict.fromkeys(("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "_upsample_nearest_exact1d",
                     "_upsample_nearest_exact2d", "_upsample_nearest_exact3d"), _scales),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _half_to_float),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _bags),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), _fractional_pool),
    **dict.fromkeys(("_fft_c2c", "_fft_c2r", "_fft_r2c"), _fft),
    **dict.fromkeys(("resize_as", "resize_as_"), _boolean), **dict.fromkeys(("view", "view_copy"), _view),
    "native_group_norm": _group_norm, "_ctc_loss": _ctc_loss, "_weight_norm_interface": _weight_norm,
    "_pack_padded_sequence": _packed, "unfold_backward": _unfolded,
}  # fmt: skip


def _between(tensor: Tensor, least: int, most: int) -> bool:
    """True if all elements are within bounds, both included; NaN is not."""
    return bool(((tensor >= least) & (tensor <= most)).all())


def _numbers(lengths: Any) -> list[int]:
    return [int(one) for one in (lengths.flatten().tolist() if isinstance(lengths, Tensor) else lengths)]


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)}"
