"""Write down what a module computes: its operators, their arguments, and every tensor that comes from outside."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from traindiff.core.torch_compat.modes import TorchDispatchMode
from traindiff.core.torch_compat.operators import DRAWING, operator_schema, without_onednn
from traindiff.core.torch_compat.training import (
    buffers_by_name,
    buffers_in,
    modules_in,
    parameters_by_name,
    parameters_in,
)
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.observe.torch.hooks.out_of_sight import with_functions
from traindiff.observe.torch.nonfinite.allowed_operators import RefusedOperatorError, check
from traindiff.observe.torch.nonfinite.calls import slots, within
from traindiff.observe.torch.nonfinite.operations import NotWritableError, Operation, to_json
from traindiff.observe.torch.nonfinite.trail import is_inexact


@dataclass(slots=True, kw_only=True)
class CapturedCall:
    """One call of a module, as its operators.

    Attributes:
        inputs: Numbers of its tensors, by slot: `input[0]`, `input.mask`.
        weights: Numbers of parameters and buffers, by name.
        outputs: Numbers of what it returned, by slot.
        gradients: Numbers of the gradients that came back to its outputs, by slot; empty where only the forward pass
            counts.
        trained: Numbers of the inputs and parameters by which the backward pass differentiates.
        operations: In the order in which they were run.
        tensors: Values of what came from outside, of random draws too, by number.
    """

    inputs: dict[str, int] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    outputs: dict[str, int] = field(default_factory=dict)
    gradients: dict[str, int] = field(default_factory=dict)
    trained: list[int] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    tensors: dict[int, Tensor] = field(default_factory=dict)


@torch.inference_mode(mode=False)  # in inference mode composite operators are not taken apart
def capture(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    gradients: Mapping[str, Tensor] | None = None,
    random_state: Tensor | None = None,
) -> CapturedCall:
    """Call a copy of a module and write down what it does.

     The module itself is not called, so that its buffers, counters and hooks stay as they are. Random generators are
    given back as they were.

    Args:
        module: Any. Its parameters and buffers must be whole here.
        args: Positional arguments; tensors in them are copied.
        kwargs: The others.
        gradients: What came back to its outputs, by slot.
        random_state: Of the CPU's generator when the call began, so that masks of dropout are those of the call. Left
            out, as on a GPU, they are others.

    Returns:
        The call.

    Raises:
        NotWritableError: The module cannot be copied, fails, or calls an operator that `traindiff rerun` does not
            call, or whose arguments cannot be written down.
    """
    copied = _copy(module)
    given = [one for _, one in tensors((list(args), dict(kwargs)), "input")]
    by_id = {id(one): _copied(one) for one in given}
    writer = _Writer()
    call = writer.call
    for slot, one in slots(args, kwargs):
        if isinstance(one, Tensor):
            call.inputs[slot] = writer.number(by_id[id(one)])
    trained = parameters_by_name(copied)
    named = (*trained.items(), *buffers_by_name(copied, tied=True).items())
    call.weights.update((name, writer.number(one)) for name, one in named)
    if gradients:
        differentiated = (*call.inputs.values(), *(call.weights[name] for name in trained))
        call.trained += [number for number in differentiated if is_inexact(call.tensors[number])]
    devices = {one.device.index or 0 for one in (*given, *parameters_in(copied)) if one.device.type == "cuda"}
    try:
        drawing = torch.random.fork_rng(devices=sorted(devices))
        with torch.no_grad(), drawing, without_onednn(), with_functions(), writer:
            if random_state is not None:
                torch.set_rng_state(random_state)
            inputs, named_inputs = replaced((list(args), dict(kwargs)), by_id)
            output = copied.forward(*inputs, **named_inputs)
    except NotWritableError:
        raise
    except Exception as error:
        raise NotWritableError(f"calling it again raised {type(error).__name__}: {error}") from error
    call.outputs.update((slot, writer.number(one)) for slot, one in within(output, "output") if isinstance(one, Tensor))
    call.gradients.update((slot, writer.number(one)) for slot, one in (gradients or {}).items())
    return call


def _copy(module: nn.Module) -> nn.Module:
    """A copy without hooks. Parameters are plain copies: what an engine has attached to them is not copied."""
    memo: dict[int, Any] = {}
    for one in (*parameters_in(module), *buffers_in(module)):
        if type(one) not in (nn.Parameter, Tensor):
            raise NotWritableError(f"a parameter is a {type(one).__name__}, which holds only a part of it here")
        if hasattr(one, "ds_shape"):
            raise NotWritableError("DeepSpeed holds only a part of a parameter here")
        value = _copied(one)
        memo[id(one)] = nn.Parameter(value, requires_grad=False) if isinstance(one, nn.Parameter) else value
    held = (item for inner in modules_in(module) for item in vars(inner).items())
    memo |= {id(hooks): type(hooks)() for name, hooks in held if name.endswith("_hooks") and hooks}
    try:
        return copy.deepcopy(module, memo)
    except Exception as error:
        raise NotWritableError(f"copying it raised {type(error).__name__}: {error}") from error


def _copied(tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().clone()
    except RuntimeError as error:  # no memory, as a rule
        raise NotWritableError(f"copying a parameter raised {type(error).__name__}: {error}") from error


def _takes_its_dtype_from_a_default(func: Any, kwargs: Mapping[str, Any], output: Any) -> bool:
    """True if an operator makes a tensor of nothing but sizes and numbers, in a dtype that nobody has named.

    It would be another one where torch has another default dtype, and stay the same one in a longer dtype.
    """
    arguments = {one.name: str(one.real_type) for one in operator_schema(func).arguments}
    return (
        isinstance(output, Tensor)
        and "dtype" in arguments
        and kwargs.get("dtype") is None
        and not any("Tensor" in kind for kind in arguments.values())
    )


class _Writer(TorchDispatchMode):
    """Writes down every operator that is called inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call = CapturedCall()
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []  # ids are those of objects that live

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor; what no operator has made comes from outside, and its value is kept as it is now."""
        if id(tensor) not in self._numbers:
            self.call.tensors[self._new(tensor)] = tensor.detach().clone()
        return self._numbers[id(tensor)]

    def _new(self, tensor: Tensor) -> int:
        number = self._numbers[id(tensor)] = len(self._alive)
        self._alive.append(tensor)
        return number

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = str(func)
        try:
            written = to_json(args, self.number), {key: to_json(one, self.number) for key, one in kwargs.items()}
        except NotWritableError as error:
            raise NotWritableError(f"{name}: {error}") from None
        output = func(*args, **kwargs)
        if _takes_its_dtype_from_a_default(func, kwargs, output):
            written[1]["dtype"] = to_json(output.dtype, self.number)
        draws = [one.detach().clone() for _, one in tensors(output, "")] if name.split(".")[1] in DRAWING else []
        drawn = {self._new(one): one for one in draws}
        self.call.tensors |= drawn  # so that every run again has the same random numbers
        made = to_json(output, self._output_number)
        operation = Operation(name=name, args=written[0], kwargs=written[1], output=made, drawn=tuple(drawn))
        try:
            check(operation)
        except RefusedOperatorError as error:
            raise NotWritableError(str(error)) from None
        self.call.operations.append(operation)
        return output

    def _output_number(self, tensor: Tensor) -> int:
        """The number of what an operator returned: its own, or that of the tensor that it wrote into."""
        return self._numbers[id(tensor)] if id(tensor) in self._numbers else self._new(tensor)
