"""Observe how exact every matrix product and convolution is, forward and backward, without a reference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from traindiff.core.observation import (
    ALLOWED,
    ERROR,
    FLIPPED,
    FORMAT,
    MEDIAN,
    PRODUCT,
    RECOMPUTED_PRODUCT,
    REPEATED,
    RESIDUAL,
    WORST_ROW,
)
from traindiff.core.torch_compat.compiling import is_compiled
from traindiff.core.torch_compat.cuda import is_capturing
from traindiff.core.torch_compat.training import modules_in
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.hooks.operator_calls import ModuleCall, Schema, inputs_of, outputs_of
from traindiff.observe.torch.hooks.operator_mode import OperatorCall, ShownOperators
from traindiff.observe.torch.products.memory import Flip, Memory
from traindiff.observe.torch.products.operators import Checked, Kind, NotJudgedError, kind_of
from traindiff.observe.torch.products.repetition import has_odd_element

COMPILED = "not checked: it is compiled, and compiled code runs no operators one by one"

COMPILED_INSIDE = "not checked: it is compiled, but for products that its code hands to a library"


_WRONG = 4.0
"""Error of a row from which on a product is found without being run again; see `product-wrong`."""


def attach(context: TapContext) -> None:
    """Check the products of all selected modules (phases `forward` and `backward`, stage `product`).

    For random signs v, `Y v` is compared with `A (B v)` in float64: that is as much work as a product with a few
    vectors, and its result is the error of each row of Y. The signs come from a generator of the tap's own. Bits that
    flip in a tensor between two operators are recorded, too (stage `flipped`).
    """
    compiled = {
        id(one) for module in modules_in(context.targets.root) if is_compiled(module) for one in modules_in(module)
    }
    tap = _Products(context)
    shown = ShownOperators(context, tap)
    context.events.before_backward.append(context.sink.guarded("products", tap.look_again))
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
    """An operator that is running, with what was read before it if it is a product that can be checked."""

    call: OperatorCall
    kind: Kind | None
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
        self._memory = Memory()

    def wants(self, schema: Schema) -> bool:  # noqa: ARG002
        """All operators: each may read what changed in memory."""
        return True

    def hidden(self, path: str, inside: ModuleCall) -> None:
        """Nothing: the nodes that are not shown make no products."""

    def begin(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Running:
        """Look at what the operator reads, and keep what it may overwrite."""
        if is_capturing():
            self._unobserved(call, "a CUDA graph is being captured")
            return _Running(call, None, {}, None)
        self._look(call, args, kwargs)
        kind = kind_of(call.schema.name)
        if kind is None:
            return _Running(call, None, {}, None)
        if not isinstance(kind, Kind):
            self._unobserved(call, kind)
            return _Running(call, None, {}, None)
        given = {**dict(zip(call.schema.arguments, args, strict=False)), **kwargs}
        try:
            return _Running(call, kind, given, kind.before(given))
        except NotJudgedError as error:
            self._unobserved(call, str(error))
            return _Running(call, None, {}, None)

    def end(self, running: _Running, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Check what the operator returned."""
        schema = running.call.schema
        if not schema.undefined and not is_capturing():
            self._memory.take((one for _, one in outputs_of(schema, args, kwargs, output)), running.call)
        if running.kind is None:
            return
        looks_right = True
        try:
            for checked in running.kind.check(running.given, running.read_before, output):
                self._record(running.call, checked)
                rows = checked.residual.rows
                looks_right = looks_right and rows.device.type == "cpu" and not bool((rows > _WRONG).any())
        except NotJudgedError as error:
            self._unobserved(running.call, str(error))
        if looks_right:
            self._repeat(running.call, args, kwargs, output)

    def end_step(self) -> None:
        """What is known of memory is void."""
        self._memory.clear()

    def _repeat(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        """Run a product again, if that changes nothing, and record whether one element differs."""
        if call.schema.written:
            return

        def again() -> Iterator[Tensor]:
            return (one for _, one in tensors(call.operator(*args, **kwargs), ""))

        if has_odd_element((one for _, one in tensors(output, "")), again):
            self._sink.emit(
                torch.ones((), dtype=torch.float64, device="cpu"), phase=call.phase, path=call.path, slot=REPEATED,
                stage=FLIPPED, call=call.inside.call, scaled=False,
            )  # fmt: skip

    def look_again(self, *_: Any) -> None:
        """Look at what the training still holds of the forward pass: the loss has read what the model returned."""
        if self._sink.progress.observing:
            self._note(self._memory.read_living())

    def _look(self, call: OperatorCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._note(self._memory.read((one for _, one in inputs_of(call.schema, args, kwargs)), call))

    def _note(self, flips: Iterable[Flip]) -> None:
        for flip in flips:
            maker = flip.maker
            assert isinstance(maker, OperatorCall)
            self._sink.emit(
                torch.tensor(float(flip.bit), dtype=torch.float64, device="cpu"), phase=maker.phase, path=maker.path,
                slot="output" if flip.is_output else "input", stage=FLIPPED, call=maker.inside.call, scaled=False,
            )  # fmt: skip

    def _record(self, call: OperatorCall, checked: Checked) -> None:
        form = {"format": str(checked.form), "terms": checked.num_terms}
        first = call.about.setdefault("products", {}).setdefault(checked.slot, form)
        forms = [{name: first[name] for name in form}, *first.get("others", ())]
        found = checked.residual
        numbers = [
            (RESIDUAL, found.rows), (ERROR, found.error), (ALLOWED, found.allowed), (WORST_ROW, found.worst),
            (MEDIAN, found.median),
        ]  # fmt: skip
        if form != forms[0]:  # the call has other dtypes, or sizes, than in another step
            if form not in forms:
                forms.append(form)
                first["others"] = forms[1:]
            place = float(forms.index(form))
            numbers.append((FORMAT, torch.tensor(place, dtype=torch.float64, device="cpu")))
        for name, tensor in numbers:
            self._sink.emit(
                tensor, phase=call.phase, path=call.path, slot=f"{checked.slot}.{name}", stage=call.inside.stage,
                call=call.inside.call, scaled=False,
            )  # fmt: skip

    def _unobserved(self, call: OperatorCall, why: str) -> None:
        self._sink.unobserved(
            f"not checked: {why}", phase=call.phase, path=call.path, slot=self.slot, stage=call.inside.stage
        )
