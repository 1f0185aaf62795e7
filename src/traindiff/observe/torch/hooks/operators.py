"""Observe every operator inside chosen modules, forward and backward: its inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from traindiff.core.observation import OPERATOR, RECOMPUTED_OPERATOR
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.operator_calls import ModuleCall, Schema, UndefinedMemory, inputs_of, outputs_of
from traindiff.observe.torch.hooks.operator_mode import OperatorCall, ShownOperators

UNDEFINED = "it holds whatever was in memory: nothing was written to it yet"

WITHOUT_MODE = "its backward pass computes other bits while it is looked into"


def attach(context: TapContext) -> None:
    """Observe operators in the modules that were chosen for it (phases `forward` and `backward`, stage `operator`)."""
    ShownOperators(context, _Operators(context)).attach(context.targets.zoomed.items())


class _Operators:
    """Records the tensors that operators read and write."""

    name = "operators"
    stages = (OPERATOR, RECOMPUTED_OPERATOR)
    slot = "output[0]"
    looks_inside = False

    def __init__(self, context: TapContext) -> None:
        self._sink = context.sink
        self._memory = UndefinedMemory()

    def wants(self, schema: Schema) -> bool:  # noqa: ARG002
        """All operators."""
        return True

    def hidden(self, path: str, inside: ModuleCall) -> None:
        """Record that an operator was not seen."""
        self._sink.unobserved(WITHOUT_MODE, phase="backward", path=path, slot=self.slot, stage=inside.stage)

    def begin(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OperatorCall:
        """Record the inputs of an operator."""
        for slot, tensor in inputs_of(call.schema, args, kwargs):
            self._emit(call, slot, tensor)
        return call

    def end(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Record the outputs of the operator."""
        schema, found = call.schema, outputs_of(call.schema, args, kwargs, output)
        if schema.undefined or schema.workspaces or self._memory:
            self._memory.note(schema, args, kwargs, output)
        for slot, tensor in found:
            self._emit(call, slot, tensor)

    def end_step(self) -> None:
        """Forget which memory is undefined."""
        self._memory.clear()

    def _emit(self, call: OperatorCall, slot: str, tensor: Tensor) -> None:
        inside = call.inside
        if self._memory.is_undefined(tensor):
            self._sink.unobserved(UNDEFINED, phase=call.phase, path=call.path, slot=slot, stage=inside.stage)
            return
        self._sink.emit(
            tensor, phase=call.phase, path=call.path, slot=slot, stage=inside.stage, call=inside.call, scaled=False
        )
