"""A replica that moves every element by -1, 0 or +1 unit in the last place, by bits that depend only on a key."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from traindiff.core.site import canonical_paths
from traindiff.core.torch_compat.autograd import inside_transform, is_view_of_another, version_of
from traindiff.core.torch_compat.training import modules_by_name, own_buffers, own_parameters, parameters_in
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.followed_modules import takes_hooks
from traindiff.observe.torch.hooks.inspect import alter_inspected
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.observe.torch.hooks.step_hooks import has_closure
from traindiff.observe.torch.perturb.replica import NAME

_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}

_INFINITY = {
    torch.float64: 0x7FF << 52,
    torch.float32: 0xFF << 23,
    torch.bfloat16: 0xFF << 7,
    torch.float16: 0x1F << 10,
}
"""The bits of infinity without its sign; those of finite numbers are smaller, those of NaN larger."""

_BLOCK = 1 << 24
"""Elements that are rounded at a time, which bounds the memory for random bits."""


def is_rounded(tensor: Tensor) -> bool:
    """True if `randomly_rounded` supports a tensor: dense, of real or complex numbers of 16, 32 or 64 bits."""
    real = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
    return real in _INTEGERS and tensor.layout is torch.strided and not tensor.is_quantized


def rounding_key(*parts: object) -> int:
    """A hash of 32 bits of all parts: a seed, a step, the names of a site."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=4).digest(), "little", signed=True)


def randomly_rounded(tensor: Tensor, key: int) -> Tensor:
    """A copy of `tensor` whose elements were moved by -1, 0 or +1 ulp, each with probability 1/3.

    Zeros, infinities and NaN stay, and no element becomes one of them, so no sign changes. The random bits are a hash
    of the key, the element's index and its value. So equal tensors are rounded alike under one key, in any order,
    and a repeated forward pass is repeated exactly.

    Args:
        tensor: A tensor for which `is_rounded` holds, any shape. It is not changed.
        key: From `rounding_key`.

    Returns:
        Same shape, dtype, device and strides (for dense tensors). Nothing is synchronized.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    rounded = torch.empty_like(tensor)  # a new tensor: autograd forbids writing to the view that a function returns
    if tensor.is_complex():
        torch.view_as_real(rounded).copy_(randomly_rounded(torch.view_as_real(tensor), key))
        return rounded
    dtype = tensor.dtype
    bits = tensor.contiguous().view(_INTEGERS[dtype]).reshape(-1)
    moved = torch.empty_like(bits)
    for first in range(0, bits.numel(), _BLOCK):
        block = slice(first, first + _BLOCK)
        moved[block] = _moved(bits[block], infinity=_INFINITY[dtype], key=rounding_key(key, first) if first else key)
    return rounded.copy_(moved.view(dtype).view(tensor.shape))


def random_signs(values: Tensor, key: int) -> Tensor:
    """-1, 0 or 1 for each element of a vector [n], in its dtype, by a hash of key, index and value."""
    values = values.detach().contiguous()
    return _thirds(values.view(_INTEGERS[values.dtype]), key).to(values.dtype)


def _moved(bits: Tensor, *, infinity: int, key: int) -> Tensor:
    """Floating-point numbers as integers [n], moved; adding 1 moves a number by 1 ulp away from zero."""
    magnitude = bits & torch.iinfo(bits.dtype).max
    step = _thirds(bits, key).to(bits.dtype)
    after = magnitude + step  # of a NaN it may overflow, to something negative
    stays = (magnitude == 0) | (magnitude >= infinity) | (after <= 0) | (after >= infinity)
    return bits + step.masked_fill_(stays, 0)


def _thirds(bits: Tensor, key: int) -> Tensor:
    """-1, 0 or 1, by a hash of key, index and value: int32 [n]. Products wrap around."""
    word = (bits ^ (bits >> 32) if bits.dtype == torch.int64 else bits).to(torch.int32)
    word = word.mul(0x9E3779B1 - 2**32).add_(key)
    word += torch.arange(len(bits), dtype=torch.int32, device=bits.device).mul_(0x85EBCA77 - 2**32)
    # A bijection of 32-bit words in which every bit depends on every bit (lowbias32 of
    # https://nullprogram.com/blog/2018/07/31/).
    word = _xor_shift(word, 16).mul_(0x7FEB352D)
    word = _xor_shift(word, 15).mul_(0x846CA68B - 2**32)
    word = _xor_shift(word, 16)
    return word.bitwise_and_(0xFFFF).mul_(3).bitwise_right_shift_(16).sub_(1)


def _xor_shift(word: Tensor, count: int) -> Tensor:
    """`word ^ (word >> count)`, the shift logical."""
    return word.bitwise_xor_((word >> count).bitwise_and_((1 << (32 - count)) - 1))


class UlpReplica:
    """Rounds the outputs of modules, their gradients, and the gradients of parameters.

    Taps observe the rounded values, and the training continues with them. The whole model is perturbed, as observed
    tensors depend on the others. Random bits depend on seed, step, site and the tensor itself. So a forward pass that
    activation checkpointing repeats is rounded as the first time, and no generator is used.

    A tensor is rounded where it was computed. A tensor that a module only passes on (an input, a parameter, the output
    of a module inside) stays the same object, and gradients accumulate in it as before.

    Args:
        seed: Another seed rounds in another way.
        root: The module that the training loop calls.
        names: Canonical path of every parameter of it by id.
    """

    def __init__(self, seed: int, root: nn.Module, names: Mapping[int, str]) -> None:
        self._seed = seed
        self._root = root
        self._names = names
        self._versions = WeakIdKeyDictionary()

    def attach(self, sink: Sink) -> ExitStack:
        """Put the hooks on; see `Replica.attach`."""
        altering = partial(sink.altering, NAME)
        modules = modules_by_name(self._root)
        with ExitStack() as undo:
            for name, path in canonical_paths(modules).items():
                if takes_hooks(module := modules[name]):
                    hook = altering(partial(self._outputs, sink, path))
                    undo.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            for parameter in parameters_in(self._root):
                if parameter.requires_grad:
                    hook = altering(partial(self._contribution, sink, self._names[id(parameter)]))
                    undo.callback(parameter.register_hook(hook).remove)
            undo.callback(register_optimizer_step_pre_hook(altering(partial(self._gradients, sink))).remove)
            undo.enter_context(alter_inspected(altering(partial(self._inspected, sink))))
            undo.callback(self._versions.clear)
            return undo.pop_all()

    def _key(self, sink: Sink, *site: str) -> int:
        evaluation = sink.progress.evaluation
        return rounding_key(self._seed, sink.progress.step, *([evaluation] if evaluation else []), *site)

    def _outputs(self, sink: Sink, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The output of the module, rounded; None if nothing in it is rounded."""
        found = list(tensors(output, "output"))
        held = {id(tensor) for tensor in (*own_parameters(module).values(), *own_buffers(module).values())}
        given = {id(tensor) for _, tensor in (*tensors(args, ""), *tensors(kwargs, ""))}
        rounded: dict[int, Tensor] = {}
        for slot, tensor in found:
            if id(tensor) in rounded or id(tensor) in held or self._is_passed_on(tensor, given):
                continue
            if is_rounded(tensor) and not (tensor.is_leaf and tensor.requires_grad):
                rounded[id(tensor)] = self._rounded(sink, tensor, path, slot, in_place=True)
        return replaced(output, rounded) if rounded else None

    def _inspected(self, sink: Sink, name: str, tensor: Any) -> Tensor | None:
        if not isinstance(tensor, Tensor) or not is_rounded(tensor) or (tensor.is_leaf and tensor.requires_grad):
            return None
        return None if self._is_passed_on(tensor, set()) else self._rounded(sink, tensor, name, "inspected")

    def _is_passed_on(self, tensor: Tensor, given: set[int]) -> bool:
        """True if the tensor is not new: it was rounded before, or is an input that was not written to."""
        version = version_of(tensor)
        if tensor in self._versions:
            return bool(self._versions[tensor] == version)
        return id(tensor) in given and version <= 0

    def _rounded(self, sink: Sink, tensor: Tensor, path: str, slot: str, *, in_place: bool = False) -> Tensor:
        key = self._key(sink, "forward", path, slot)
        if tensor.requires_grad and torch.is_grad_enabled():
            rounded: Tensor
            if in_place and _saves_its_output(tensor) and not (is_view_of_another(tensor) or inside_transform()):
                # Of what the operation saved of its output (Tanh, Softmax), a gradient that is differentiated
                # again goes to this tensor, and so it is seen there, as without the replica.
                rounded = tensor
                rounded.data.copy_(randomly_rounded(tensor, key))
            else:
                rounded = _Rounded.apply(tensor, key)  # type: ignore[no-untyped-call]
            key = self._key(sink, "backward", path, slot)
            # A hook on the tensor, and not a part of the function, so that the hooks of taps run after it.
            rounded.register_hook(sink.altering(NAME, partial(_rounded_gradient, key)))
        else:
            rounded = randomly_rounded(tensor, key)
        self._versions[rounded] = version_of(rounded)
        return rounded

    def _contribution(self, sink: Sink, path: str, gradient: Tensor | None) -> Tensor | None:
        return _rounded_gradient(self._key(sink, "grad.micro", path), gradient)

    def _gradients(self, sink: Sink, optimizer: Optimizer, *call: Any) -> None:
        """Round the gradients that the optimizer is about to use, in place.

        A closure given to `step` computes gradients later; then only the contributions are rounded.
        """
        if has_closure(optimizer, *call):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                path, gradient = self._names.get(id(parameter)), parameter.grad
                if path is not None and gradient is not None and is_rounded(gradient):
                    held: Any = gradient.detach()
                    if hasattr(held, "to_local"):
                        held = held.to_local()  # this rank's part of a DTensor, as a view
                    held.copy_(randomly_rounded(held, self._key(sink, "grad", path)))


_SAVING = frozenset(
    {"Elu", "Exp", "Expm1", "LogSoftmax", "Reciprocal", "Rsqrt", "Sigmoid", "Softmax", "Sqrt", "Tan", "Tanh"}
)
"""Operators of torch that save their output, and compute their gradient from it smoothly."""


def _saves_its_output(tensor: Tensor) -> bool:
    """True for the output of such an operator, which no other tensor holds."""
    return type(tensor) is Tensor and type(tensor.grad_fn).__name__.removesuffix("Backward0") in _SAVING


class _Rounded(torch.autograd.Function):
    """The rounded tensor, with the gradient of the tensor. Under `torch.vmap`, each sample is rounded by itself."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, key: int) -> Tensor:
        return randomly_rounded(tensor, key)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:  # noqa: ARG004
        ctx.hides_nothing = True  # from those who look for parameters in the graph
        ctx.set_materialize_grads(False)  # a missing gradient stays None

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:  # noqa: ARG004
        return gradient, None


def _rounded_gradient(key: int, gradient: Tensor | None) -> Tensor | None:
    """The gradient, rounded; None if it is not rounded, or there is none.

    In a backward pass with `create_graph=True` the training differentiates the gradient, so the graph goes on.
    """
    if gradient is None or not is_rounded(gradient):
        return None
    if gradient.requires_grad and torch.is_grad_enabled():
        differentiable: Tensor = _Rounded.apply(gradient, key)  # type: ignore[no-untyped-call]
        return differentiable
    return randomly_rounded(gradient, key)
