"""Observe how exact every matrix product and convolution is, forward and backward, without a reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from traindiff.core.observation import (
    ALLOWED,
    ERROR,
    MEDIAN,
    PRODUCT,
    RECOMPUTED_PRODUCT,
    RESIDUAL,
    WORST_ROW,
)
from traindiff.core.torch_compat.execution import is_capturing, is_compiled
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.operator_calls import ModuleCall, Schema
from traindiff.observe.torch.hooks.operator_mode import OperatorCall, ShownOperators
from traindiff.observe.torch.products.operators import Checked, Kind, NotJudgedError, kind_of

COMPILED = "not checked: it is compiled, and compiled code runs no operators one by one"

COMPILED_INSIDE = "not checked: it is compiled, but for products that its code hands to a library"


def attach(context: TapContext) -> None:
    """Check the products of all selected modules (phases `forward` and `backward`, stage `product`).

    For random signs v, `Y v` is compared with `A (B v)` in float64: that is as much work as a product with a few
    vectors, and its result is the error of each row of Y. The signs come from a generator of the tap's own.
    """
    compiled = {id(one) for module in context.targets.root.modules() if is_compiled(module) for one in module.modules()}
    shown = ShownOperators(context, _Products(context))
    shown.attach(_looked_into(context.targets.modules.items(), compiled, context))


def _looked_into(
    modules: Iterable[tuple[str, nn.Module]], compiled: set[int], context: TapContext
) -> Iterable[tuple[str, nn.Module]]:
    """The modules that are not compiled; of the others, those that no compiled one contains are reported."""
    followed: list[str] = []
    left_out: list[str] = []
    for path, module in modules:
        if id(module) not in compiled:
            followed.append(path)
            yield path, module
        elif not any(_holds(outer, path) for outer in left_out):
            left_out.append(path)
            why = COMPILED_INSIDE if any(_holds(outer, path) for outer in followed) else COMPILED
            context.sink.unobserved(why, phase="forward", path=path, slot=RESIDUAL, stage=PRODUCT)


def _holds(outer: str, path: str) -> bool:
    return not outer or path.startswith(f"{outer}.")


class _Running(NamedTuple):
    """A product that is running, with what was read before it."""

    call: OperatorCall
    kind: Kind
    given: Mapping[str, Any]
    read_before: Any


class _Products:
    """Checks products, and records how far they are from the exact ones."""

    name = "products"
    stages = (PRODUCT, RECOMPUTED_PRODUCT)
    slot = RESIDUAL
    looks_inside = True

    def __init__(self, context: TapContext) -> None:
        self._sink = context.sink

    def wants(self, schema: Schema) -> bool:
        """Operators that are products, or have some inside."""
        return kind_of(schema.name) is not None

    def hidden(self, path: str, inside: ModuleCall) -> None:
        """Nothing: the nodes that are not shown make no products."""

    def begin(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Running | None:
        """Read what the operator may overwrite; None if it cannot be checked."""
        kind = kind_of(call.schema.name)
        if not isinstance(kind, Kind):
            self._unobserved(call, kind or "")
            return None
        if is_capturing():
            self._unobserved(call, "a CUDA graph is being captured")
            return None
        given = {**dict(zip(call.schema.arguments, args, strict=False)), **kwargs}
        try:
            return _Running(call, kind, given, kind.before(given))
        except NotJudgedError as error:
            self._unobserved(call, str(error))
            return None

    def end(self, running: _Running, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:  # noqa: ARG002
        """Check what the operator returned."""
        try:
            for checked in running.kind.check(running.given, running.read_before, output):
                self._record(running.call, checked)
        except NotJudgedError as error:
            self._unobserved(running.call, str(error))

    def end_step(self) -> None:
        """Nothing is kept from one operator to the next."""

    def _record(self, call: OperatorCall, checked: Checked) -> None:
        call.about.setdefault("products", {})[checked.slot] = {"format": str(checked.form), "terms": checked.num_terms}
        found = checked.residual
        for name, tensor in (
            (RESIDUAL, found.rows), (ERROR, found.error), (ALLOWED, found.allowed), (WORST_ROW, found.worst),
            (MEDIAN, found.median),
        ):  # fmt: skip
            self._sink.emit(
                tensor, phase=call.phase, path=call.path, slot=f"{checked.slot}.{name}", stage=call.inside.stage,
                call=call.inside.call, scaled=False,
            )  # fmt: skip

    def _unobserved(self, call: OperatorCall, why: str) -> None:
        self._sink.unobserved(
            f"not checked: {why}", phase=call.phase, path=call.path, slot=self.slot, stage=call.inside.stage
        )
