"""Notice gradients that an optimizer has read, and that nothing clears before the next backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import TypeAlias
from weakref import ReferenceType, ref

from torch import Tensor

from traindiff.core.observation import CARRIED
from traindiff.core.torch_compat.autograd import version_of
from traindiff.core.torch_compat.cuda import is_capturing
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.nested import as_tensor
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.hooks.step_tensors import has_numbers, local_part
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors

_Held: TypeAlias = tuple[Tensor, ReferenceType[Tensor], int]
"""A parameter, its gradient, and the gradient's version."""


def attach(context: TapContext) -> None:
    """Record which gradients were not cleared since the optimizer read them: phase `grad`, stage `carried`."""
    tap = _Tap(context)
    for event, look in (
        (context.events.at_backward, tap.before_backward),
        (context.events.after_backward, tap.after_backward),
        (context.events.on_gradients, tap.look),
        (context.events.after_call, tap.after_call),
    ):
        event.append(context.sink.guarded("carried_gradients", look))


class _Tap:
    """The gradients of all followed optimizers, by name."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._by_name: dict[str, CarriedGradients] = {}

    def after_call(self, name: str) -> None:
        """Note the gradients that a step of an optimizer leaves, if what comes next is recorded."""
        self._by_name.pop(name, None)
        if self._context.sink.progress.observing:
            leaves = self._context.targets.leaf_ids  # autograd adds to their gradients; others are filled
            held = (one for one, _ in self._context.optimizers[name].selected() if id(one) in leaves)
            self._by_name[name] = CarriedGradients(held)

    def before_backward(self) -> None:
        """Look at the gradients that a backward pass finds."""
        for held in self._by_name.values():
            held.before_backward()

    def after_backward(self) -> None:
        """Look at the gradients that it leaves."""
        for held in self._by_name.values():
            held.after_backward()

    def look(self, tap: OptimizerTap, *_: object) -> None:
        """Record what is carried when the optimizer's gradients are known."""
        held = self._by_name.pop(tap.name, None)
        carried = held.carried(unwritten=tap.has_closure) if held else frozenset()
        for parameter, pieces in tap.selected() if carried else ():
            for one in pieces if id(parameter) in carried else ():
                self._context.sink.emit(
                    as_tensor(1), phase="grad", path=one.path, slot="grad", stage=CARRIED, optimizer=tap.name
                )


class CarriedGradients(HoldsTensors):
    """The gradients of one optimizer, from one step of it to the next.

    A gradient is carried into a step if a backward pass adds to the tensor that the step before read, nobody wrote to
    it in between, and it is not all zeros then. That is exact: it needs no noise floor. Counters of writes tell; only
    of a gradient that nobody wrote to are the numbers looked at, because writes through `.data` are not counted.

    Args:
        parameters: Those that the optimizer has just stepped.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__()
        self._held: list[_Held] = [
            (parameter, ref(gradient), _version_of(gradient))
            for parameter in parameters
            if (gradient := parameter.grad) is not None
        ]
        self._added: set[int] = set()  # ids of parameters to whose gradients a backward pass has added
        self._num_backward = 0

    def forget_tensors(self) -> None:
        """See `HoldsTensors`."""
        self._held.clear()

    def before_backward(self) -> None:
        """Drop the gradients that were replaced, or written to, since the latest step or backward pass."""
        if not self._held:
            return
        self._held = [held for held in self._held if _is_untouched(held)]
        if self._held and not self._num_backward:
            self._held = _with_numbers(self._held)
        self._added.intersection_update(id(parameter) for parameter, _, _ in self._held)
        self._num_backward += 1

    def after_backward(self) -> None:
        """Note the gradients as a backward pass leaves them."""
        held, self._held = self._held, []
        for parameter, seen, version in held:
            gradient = parameter.grad
            if gradient is None:
                continue
            if seen() is not gradient or _version_of(gradient) != version:
                self._added.add(id(parameter))
            self._held.append((parameter, ref(gradient), _version_of(gradient)))

    def carried(self, *, unwritten: bool = False) -> Set[int]:
        """Ids of the parameters whose gradients are carried; to be called when the optimizer reads the gradients.

        Args:
            unwritten: Only those that nobody wrote to since the last backward pass. In a closure, the training may take
                away what was carried; elsewhere, it often divides or reduces gradients there, by hand.
        """
        held = (one for one in self._held if not unwritten or _is_untouched(one))
        return self._added.intersection(id(parameter) for parameter, _, _ in held)


def _version_of(gradient: Tensor) -> int:
    """The counter of writes to the part of a gradient on this rank: a view of it has the same counter."""
    return version_of(local_part(gradient))


def _is_untouched(held: _Held) -> bool:
    parameter, seen, version = held
    gradient = parameter.grad
    return gradient is not None and seen() is gradient and _version_of(gradient) == version >= 0


def _with_numbers(held: Sequence[_Held]) -> list[_Held]:
    """Those whose gradient is not all zeros; none of those that cannot be read now."""
    return [] if is_capturing() else [one for one in held if has_numbers(one[0].grad)]
