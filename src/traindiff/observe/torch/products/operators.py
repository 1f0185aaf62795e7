"""The operators of torch that are products, and how each is checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from traindiff.core.kernels.torch_arrays import name_of_dtype
from traindiff.observe.torch.products import convolutions, matrices
from traindiff.observe.torch.products.convolutions import Geometry
from traindiff.observe.torch.products.matrices import Added, Factor
from traindiff.observe.torch.products.residuals import Residual
from traindiff.observe.torch.products.rounding import Format

Arguments = Mapping[str, Any]
"""Arguments of an operator by the names in its schema."""


class NotJudgedError(Exception):
    """A product cannot be checked; the message is a clause that gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One product of an operator, checked.

    Attributes:
        slot: Which of its outputs.
        form: Its dtypes.
        num_terms: Number of terms of an element.
        residual: How far it is from the exact product.
    """

    slot: str
    form: Format
    num_terms: int
    residual: Residual


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """An operator that is a product.

    Attributes:
        before: What must be read before the operator runs, because it may write to it.
        check: The checks of its outputs, from its arguments, what `before` has read, and what it returned.
    """

    before: Callable[[Arguments], Added | None]
    check: Callable[[Arguments, Added | None, Any], Iterator[Checked]]


def kind_of(name: str) -> Kind | str | None:
    """How an operator is checked, given its name without the overload, e.g. `aten.mm`.

    Returns:
        The reason if it holds products that cannot be seen from outside; None if it is no product.
    """
    return _KINDS.get(name) or _INSIDE.get(name)


_KNOWN = frozenset(
    {
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
        torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    }
)  # fmt: skip
"""Dtypes of products that can be checked. Others hold two numbers in an element, or scales alone."""


def refuse(*tensors: Tensor | None) -> None:
    """Raise unless the products of such tensors can be checked.

    Raises:
        NotJudgedError: They cannot.
    """
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.dtype not in _KNOWN:
            raise NotJudgedError(f"it is a product of {name_of_dtype(tensor.dtype)}")
        if tensor.is_nested:
            raise NotJudgedError("a factor is a nested tensor")
        if tensor.layout != torch.strided:
            raise NotJudgedError(f"a factor is {str(tensor.layout).removeprefix('torch.')}")
        if tensor.device.type in ("mps", "meta"):
            raise NotJudgedError(f"there is no float64 on {tensor.device.type}")


def _matrices(first: str, second: str, plus: str = "") -> Kind:
    """A product of matrices, or of several, or with a vector; `plus` names what is added to it."""

    def read(given: Arguments) -> tuple[Tensor, Tensor]:
        left, right = given[first], given[second]
        refuse(left, right)
        if right.dim() == 1:  # a vector is a column
            right = right.unsqueeze(-1)
        if left.dim() == 1:  # and a vector on the left a row
            left = left.unsqueeze(0)
        return (left, right) if left.dim() == 3 else (left.unsqueeze(0), right.unsqueeze(0))

    def before(given: Arguments) -> Added | None:
        beta = given.get("beta", 1)
        if not plus or beta == 0:
            return None
        left, right = read(given)
        values = given[plus]
        refuse(values)
        if given[second].dim() == 1 and values.dim() == 1:
            values = values.unsqueeze(-1)
        return matrices.added(values, (left.shape[0], left.shape[1], right.shape[2]), float(beta))

    def check(given: Arguments, read_before: Added | None, output: Tensor) -> Iterator[Checked]:
        left, right = read(given)
        refuse(output)
        form = Format(inputs=(left.dtype, right.dtype), output=output.dtype, device=output.device.type)
        found = output.reshape(left.shape[0], left.shape[1], right.shape[2])
        if not left.numel() or not right.numel():
            return
        yield Checked(
            slot="output[0]", form=form, num_terms=left.shape[-1],
            residual=matrices.check(
                Factor(values=left), Factor(values=right), found, alpha=float(given.get("alpha", 1)),
                plus=read_before, form=form,
            ).in_shape(output.shape[:-1] if given[first].dim() > 1 and given[second].dim() > 1 else output.shape),
        )  # fmt: skip

    return Kind(before=before, check=check)


def _nothing(given: Arguments) -> None:  # noqa: ARG001
    return None


def _scaled(given: Arguments, _: Added | None, output: Tensor) -> Iterator[Checked]:
    """`_scaled_mm`: a product of FP8 matrices, with a scale for each, or for each row and each column."""
    left, right, bias = given["self"], given["mat2"], given.get("bias")
    refuse(left, right, output, bias)
    if torch.finfo(output.dtype).bits == 8:
        raise NotJudgedError(f"its result is {name_of_dtype(output.dtype)}, which may be cut off at the largest number")
    if given.get("scale_result") is not None:
        raise NotJudgedError("its result is scaled")
    scales = given["scale_a"], given["scale_b"]
    shapes = (1, left.shape[0], 1), (1, 1, right.shape[1])
    for scale, shape in zip(scales, shapes, strict=True):
        if scale.dtype != torch.float32 or scale.numel() not in (1, math.prod(shape)):
            raise NotJudgedError("its scales are of blocks")
    first, second = (
        scale.reshape(shape if scale.numel() > 1 else (1, 1, 1)) for scale, shape in zip(scales, shapes, strict=True)
    )
    if not left.numel() or not right.numel():
        return
    form = Format(inputs=(left.dtype, right.dtype), output=output.dtype, device=output.device.type)
    plus = None if bias is None else matrices.added(bias, (1, *output.shape), 1.0)
    yield Checked(
        slot="output[0]", form=form, num_terms=left.shape[-1],
        residual=matrices.check(
            Factor(values=left.unsqueeze(0), scale=first), Factor(values=right.unsqueeze(0), scale=second),
            output.unsqueeze(0), plus=plus, form=form,
        ).in_shape(output.shape[:-1]),
    )  # fmt: skip


def _grouped(given: Arguments, _: Added | None, output: Tensor) -> Iterator[Checked]:
    """`_grouped_mm`: one product for each group of rows (or columns, or terms), whose ends are in `offs`."""
    left, right, ends = given["self"], given["mat2"], given.get("offs")
    refuse(left, right, output)
    if given.get("bias") is not None:
        raise NotJudgedError("a bias is added to its groups")
    form = Format(inputs=(left.dtype, right.dtype), output=output.dtype, device=output.device.type)
    if ends is None:
        parts = [(left, right, output)]
    else:
        bounds = list(pairwise([0, *ends.tolist()]))  # this waits for the device, as the operator itself may
        groups = range(len(bounds))
        if left.dim() == 2 and right.dim() == 3:
            parts = [(left[a:b], right[group], output[a:b]) for group, (a, b) in zip(groups, bounds, strict=True)]
        elif left.dim() == 3 and right.dim() == 2:
            parts = [(left[g], right[:, a:b], output[:, a:b]) for g, (a, b) in zip(groups, bounds, strict=True)]
        else:
            parts = [(left[:, a:b], right[a:b], output[g]) for g, (a, b) in zip(groups, bounds, strict=True)]
    for group, (one, other, found) in enumerate(parts):
        if not one.numel() or not other.numel():
            continue
        whole = (one, other, found) if one.dim() == 3 else (one.unsqueeze(0), other.unsqueeze(0), found.unsqueeze(0))
        yield Checked(
            slot="output[0]" if ends is None else f"output[0][{group}]", form=form, num_terms=one.shape[-1],
            residual=matrices.check(Factor(values=whole[0]), Factor(values=whole[1]), whole[2], form=form).in_shape(
                found.shape[:-1]
            ),
        )  # fmt: skip


def _geometry(given: Arguments) -> Geometry:
    return Geometry(
        stride=given["stride"], padding=given["padding"], dilation=given["dilation"], transposed=given["transposed"],
        output_padding=given["output_padding"], groups=given["groups"],
    )  # fmt: skip


def _convolution(given: Arguments, _: Added | None, output: Tensor) -> Iterator[Checked]:
    images, weight, bias = given["input"], given["weight"], given.get("bias")
    refuse(images, weight, bias, output)
    if not output.numel() or not weight.numel():
        return
    how = _geometry(given)
    form = _form(images, weight, output)
    residual = convolutions.check(images, weight, bias, output, how, form)
    yield Checked(
        slot="output[0]", form=form, num_terms=convolutions.num_terms(weight, how.groups, transposed=how.transposed),
        residual=residual,
    )  # fmt: skip


def _convolution_backward(given: Arguments, _: Added | None, output: Any) -> Iterator[Checked]:
    gradient, images, weight = given["grad_output"], given["input"], given["weight"]
    refuse(gradient, images, weight)
    if not gradient.numel() or not weight.numel() or not images.numel():
        return
    how = _geometry(given)
    of_images, of_weight = output[0], output[1]
    if isinstance(of_images, Tensor) and given["output_mask"][0]:
        adjoint = how.adjoint(weight, gradient.shape, images.shape)
        form = _form(gradient, weight, of_images)
        terms = convolutions.num_terms(weight, how.groups, transposed=adjoint.transposed)
        residual = convolutions.check(gradient, weight, None, of_images, adjoint, form)
        yield Checked(slot="output[0]", form=form, num_terms=terms, residual=residual)
    if isinstance(of_weight, Tensor) and given["output_mask"][1]:
        form = _form(gradient, images, of_weight)
        terms = gradient.numel() // gradient.shape[1]
        residual = convolutions.check_weight_gradient(images, gradient, of_weight, how, form)
        yield Checked(slot="output[1]", form=form, num_terms=terms, residual=residual)


def _form(first: Tensor, second: Tensor, output: Tensor) -> Format:
    return Format(
        inputs=(first.dtype, second.dtype), output=output.dtype, device=output.device.type, is_convolution=True
    )


_KINDS: Mapping[str, Kind] = {
    "aten.mm": _matrices("self", "mat2"),
    "aten.bmm": _matrices("self", "mat2"),
    "aten.mv": _matrices("self", "vec"),
    "aten.dot": _matrices("self", "tensor"),
    "aten.vdot": _matrices("self", "other"),
    "aten.addmm": _matrices("mat1", "mat2", plus="self"),
    "aten.addmm_": _matrices("mat1", "mat2", plus="self"),
    "aten.addmv": _matrices("mat", "vec", plus="self"),
    "aten.addmv_": _matrices("mat", "vec", plus="self"),
    "aten.baddbmm": _matrices("batch1", "batch2", plus="self"),
    "aten.baddbmm_": _matrices("batch1", "batch2", plus="self"),
    "aten._scaled_mm": Kind(before=_nothing, check=_scaled),
    "aten._grouped_mm": Kind(before=_nothing, check=_grouped),
    "aten.convolution": Kind(before=_nothing, check=_convolution),
    "aten.convolution_backward": Kind(before=_nothing, check=_convolution_backward),
}
"""By the name of the operator, without its overload."""

_ATTENTION = "its products are inside the kernel, which does not return the attention weights"
_RECURRENT = "its products are inside the kernel, which does not return what they make"
_BLOCKS = "its scales are of blocks"
_ADDED_UP = "it adds several products up"

_INSIDE: Mapping[str, str] = {
    **{
        f"aten._scaled_dot_product_{name}": _ATTENTION
        for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
        for name in (kernel, f"{kernel}_backward")
    },
    "aten._scaled_dot_product_fused_attention_overrideable": _ATTENTION,
    "aten._scaled_dot_product_fused_attention_overrideable_backward": _ATTENTION,
    "aten._flash_attention_forward": _ATTENTION,
    "aten._flash_attention_backward": _ATTENTION,
    "aten._efficient_attention_forward": _ATTENTION,
    "aten._efficient_attention_backward": _ATTENTION,
    "flex_attention": _ATTENTION,
    "flex_attention_backward": _ATTENTION,
    "aten.mkldnn_rnn_layer": _RECURRENT,
    "aten.mkldnn_rnn_layer_backward": _RECURRENT,
    "aten._cudnn_rnn": _RECURRENT,
    "aten._cudnn_rnn_backward": _RECURRENT,
    "aten._addmm_activation": "its product is inside the kernel, which returns the activation",
    "aten.addbmm": _ADDED_UP,
    "aten.addbmm_": _ADDED_UP,
    "aten._scaled_mm_v2": _BLOCKS,
    "aten._scaled_grouped_mm": _BLOCKS,
    "aten._scaled_grouped_mm_v2": _BLOCKS,
}
"""Operators whose products cannot be checked, with the reason."""
