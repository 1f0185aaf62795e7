"""A replica that computes the same training in a longer dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from traindiff.core.observation import ITSELF
from traindiff.core.torch_compat.autograd import inside_backward, storage_key
from traindiff.core.torch_compat.operators import DRAWING, operator_schema
from traindiff.core.torch_compat.training import modules_in, parameters_in
from traindiff.observe.common.containers import mapped
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.observe.torch.perturb.conversion import Conversion, call_cast, is_shorter, is_view, tensors_of
from traindiff.observe.torch.perturb.replica import Dispatching

_AUTOCAST_SHORT = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "convolution", "linear", "mkldnn_rnn_layer", "_cudnn_rnn",
        "_thnn_fused_lstm_cell", "prelu", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
    }
)  # fmt: skip
"""Operators that autocast computes in its dtype. (It leaves float64 alone, so here it does not.)"""

_AUTOCAST_LONG = frozenset(
    {
        "_softmax", "_log_softmax", "native_layer_norm", "native_group_norm", "exp", "log", "pow", "rsqrt", "sum",
        "prod", "cumsum", "nll_loss_forward", "mse_loss", "smooth_l1_loss", "binary_cross_entropy_with_logits",
    }
)  # fmt: skip
"""Operators that autocast computes in float32."""


class NominalDtypes:
    """Remembers, by storage, the dtypes that tensors have in the training as it is; views share a storage.

    Attributes:
        autocast: The dtype of the current autocast region of the training; None outside.
    """

    def __init__(self) -> None:
        self.autocast: torch.dtype | None = None
        self._by_storage: dict[int, torch.dtype] = {}  # bounded: addresses are used again

    def of(self, tensor: Tensor) -> torch.dtype:
        """The dtype that this tensor would have."""
        return self._by_storage.get(storage_key(tensor), tensor.dtype) if _has_storage(tensor) else tensor.dtype

    def note(self, tensor: Tensor, dtype: torch.dtype) -> None:
        """Note that `tensor` has this dtype in the training as it is."""
        if not _has_storage(tensor):
            return
        if dtype == tensor.dtype:
            self._by_storage.pop(storage_key(tensor), None)
        else:
            self._by_storage[storage_key(tensor)] = dtype

    def clear(self) -> None:
        """Forget everything."""
        self._by_storage.clear()

    def of_result(self, name: str, inputs: Iterable[Tensor]) -> torch.dtype | None:
        """The dtype that this operator of aten returns in the training as it is; None if the inputs do not tell."""
        floating = [tensor for tensor in inputs if tensor.is_floating_point()]
        if not floating:
            return None
        if self.autocast is not None and name in _AUTOCAST_SHORT:
            return self.autocast
        if self.autocast is not None and name in _AUTOCAST_LONG:
            return torch.float32
        decisive = [tensor for tensor in floating if tensor.dim()] or floating
        return reduce(torch.promote_types, map(self.of, decisive))


def current_autocast() -> torch.dtype | None:
    """The dtype of the current autocast region; not to be called inside an operator."""
    for device in ("cuda", "cpu"):
        if torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
    return None


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter)


INPUTS = "replica_inputs"
"""Name of the tap that a fault in a conversion disables; not `replica`, which a failing operator disables."""

_DROPOUT = frozenset({"native_dropout", "_fused_dropout"})


class PrecisionReplica:
    """Computes in `dtype` everything that the training computes in a shorter one.

    Parameters, buffers, gradients and the state of optimizers are converted in place, and back at the end. Operators
    get promoted inputs, and a shorter dtype that the training or a default requests becomes `dtype`. Autocast leaves
    float64 tensors alone, and its requests become `dtype` too. Random numbers are drawn as usual and then promoted,
    so masks stay the same.

    Tensors that an operator writes to keep the dtype that they had before the recording. An operator that cannot
    compute in `dtype` computes in its own, and the recording says so.

    Args:
        dtype: float64; or float32, for a training in bfloat16 or float16.
        root: The module that the training loop calls.
    """

    def __init__(self, dtype: torch.dtype, root: nn.Module) -> None:
        self._dtype = dtype
        self._root = root
        self._nominal = NominalDtypes()
        self._usual = _usual_dtype(root)
        self._not_promoted: set[str] = set()

    def attach(self, sink: Sink) -> ExitStack:
        """Convert the model and enter the dispatch mode; see `Replica.attach`."""
        self._sink = sink
        conversion = Conversion(self._root, self._dtype, self._nominal.note)
        with ExitStack() as undo:
            undo.callback(self._nominal.clear)
            undo.callback(conversion.restore)
            conversion.convert_model()
            optimizers = sink.guarded(INPUTS, conversion.convert_optimizer)
            undo.callback(register_optimizer_step_pre_hook(optimizers).remove)
            inputs = sink.altering(INPUTS, self._promoted_inputs)
            undo.callback(self._root.register_forward_pre_hook(inputs, with_kwargs=True).remove)
            for module in modules_in(self._root):
                noted = sink.guarded(INPUTS, self._note_autocast)
                undo.callback(module.register_forward_pre_hook(noted).remove)
            undo.enter_context(Dispatching(self._compute, sink, ends=False).enter())
            return undo.pop_all()

    def _note_autocast(self, *_: Any) -> None:
        self._nominal.autocast = current_autocast()

    def _promoted_inputs(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The root's inputs in `dtype`, as modules check that inputs and parameters have the same dtype."""
        promoted: dict[int, Tensor] = {}
        for _slot, tensor in (*tensors(args, ""), *tensors(kwargs, "")):
            if is_shorter(tensor.dtype, self._dtype):
                promoted[id(tensor)] = tensor.to(self._dtype)
                self._nominal.note(promoted[id(tensor)], tensor.dtype)
        return (replaced(args, promoted), replaced(kwargs, promoted)) if promoted else None

    def _compute(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        name = operator_schema(operator).name.partition("::")[2]
        given = tensors_of(args, kwargs)
        if name == "_to_copy" and inside_backward() and not torch.is_grad_enabled():
            return operator(*args, **kwargs)  # autograd gives a gradient the shorter dtype of its tensor
        if name in DRAWING:  # in the original dtype it draws the same numbers
            usual = self._usual_of(given)
            args, kwargs = mapped((args, kwargs), torch.dtype, lambda one: usual if one is self._dtype else one)
        if name in DRAWING or operator is torch.ops.aten.view.dtype:
            return self._promoted(call_cast(operator, args, kwargs, self._in_nominal), None, given)
        if name in _DROPOUT:
            return self._dropout(operator, *args, **kwargs)
        asked = next((one for one in (*args, *kwargs.values()) if isinstance(one, torch.dtype)), None)
        args, kwargs = self._longer((args, kwargs))
        if is_view(operator):
            return operator(*args, **kwargs)
        if asked is None or not asked.is_floating_point:
            nominal = self._nominal.of_result(name, given)
        else:
            nominal = self._usual_of(given) if asked == self._dtype else asked
        return self._promoted(self._computed(operator, args, kwargs), nominal, given)

    def _computed(self, operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of the operator in `dtype`, or in the longest dtype in which it can compute."""
        try:
            result = call_cast(operator, args, kwargs, self._in_longer)
            if isinstance(result, Tensor) and self._is_quotient(result, tensors_of(args, kwargs)):
                numbers, named = mapped((args, kwargs), Tensor, lambda one: one.to(self._dtype))
                return operator(*numbers, **named)
            return result
        except (RuntimeError, NotImplementedError, TypeError):
            try:  # scalars of loss scaling, counters of fused optimizers
                return call_cast(operator, args, kwargs, self._numbers_in_nominal)
            except (RuntimeError, NotImplementedError, TypeError):
                result = call_cast(operator, args, kwargs, self._in_nominal)
        self._note_not_promoted(str(operator))
        return result

    def _is_quotient(self, result: Tensor, given: list[Tensor]) -> bool:
        """True if the result has the default dtype because all inputs are integers, as in `integer / 7`."""
        return (
            bool(given) and is_shorter(result.dtype, self._dtype) and not any(one.is_floating_point() for one in given)
        )

    def _in_longer(self, tensor: Tensor, written: bool) -> torch.dtype:  # noqa: FBT001
        return self._dtype if is_shorter(tensor.dtype, self._dtype) and not written else tensor.dtype

    def _in_nominal(self, tensor: Tensor, written: bool) -> torch.dtype:  # noqa: ARG002, FBT001
        return self._nominal.of(tensor)

    def _numbers_in_nominal(self, tensor: Tensor, written: bool) -> torch.dtype:  # noqa: FBT001
        return self._nominal.of(tensor) if tensor.numel() == 1 else self._in_longer(tensor, written)

    def _usual_of(self, given: list[Tensor]) -> torch.dtype:
        """The dtype that is meant by a request for `dtype`, which is mostly the `x.dtype` of another tensor."""
        return self._nominal.of_result("", given) or self._usual

    def _longer(self, arguments: Any) -> Any:
        """The arguments with `dtype` in place of shorter dtypes."""
        return mapped(arguments, torch.dtype, lambda one: self._dtype if is_shorter(one, self._dtype) else one)

    def _dropout(self, operator: Any, tensor: Tensor, probability: float, *others: Any, **kwargs: Any) -> Any:
        """Dropout with the mask that the training as it is draws."""
        nominal = self._nominal.of(tensor)
        _, mask = operator(tensor.to(nominal), probability, *others, **kwargs)
        scale = 0.0 if probability == 1.0 else 1.0 / (1.0 - probability)
        dropped = tensor.to(self._dtype) * mask * scale
        self._nominal.note(dropped, nominal)
        return dropped, mask

    def _promoted(self, result: Any, nominal: torch.dtype | None, given: list[Tensor]) -> Any:
        """The result in `dtype`, with a note of the dtypes that it has in the training as it is."""

        def promote(one: Tensor) -> Tensor:
            if not one.is_floating_point() or any(one is other for other in given):
                return one
            would_be = nominal if nominal is not None else one.dtype
            if is_shorter(one.dtype, self._dtype):
                one = one.to(self._dtype)
            self._nominal.note(one, would_be if is_shorter(would_be, self._dtype) else one.dtype)
            return one

        return mapped(result, Tensor, promote)

    def _note_not_promoted(self, operator: str) -> None:
        if operator not in self._not_promoted:
            self._not_promoted.add(operator)
            reason = (
                f"{operator} cannot compute in {str(self._dtype).removeprefix('torch.')}, and did in a shorter dtype"
            )
            self._sink.unobserved(reason, phase="batch", path=ITSELF, slot=operator)


def _usual_dtype(root: nn.Module) -> torch.dtype:
    """The dtype of most parameters of the model."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters_in(root):
        if parameter.is_floating_point():
            sizes[parameter.dtype] += parameter.numel()
    return sizes.most_common(1)[0][0] if sizes else torch.get_default_dtype()
