"""Notice gradients that something clears after a backward pass, before any step of an optimizer has read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType, ref

from torch import Tensor

from traindiff.core.observation import ALL_GRADIENTS, CLEARED
from traindiff.core.torch_compat.autograd import version_of
from traindiff.core.torch_compat.cuda import is_capturing
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.nested import as_tensor
from traindiff.observe.torch.hooks.step_tensors import has_numbers, local_part, main_gradient
from traindiff.observe.torch.hooks.swapped_tensors import HoldsTensors

_MOST_HELD = 8
"""Parameters of an optimizer whose gradients are followed, spread over all that it holds."""


def attach(context: TapContext) -> None:
    """Record the passes whose gradients were cleared: phase `grad`, stage `cleared`, the number of a micro-step."""
    tap = _Tap(context)
    for event, look in (
        (context.events.at_backward, tap.before_backward),
        (context.events.after_backward, tap.after_backward),
        (context.events.after_call, tap.after_call),
        (context.events.after_step, tap.after_step),
    ):
        event.append(context.sink.guarded("cleared_gradients", look))


class _Seen(NamedTuple):
    """A gradient as a pass left it: its parameter, the tensor, and the tensor's version."""

    parameter: Tensor
    gradient: ReferenceType[Tensor]
    version: int

    @property
    def is_cleared(self) -> bool:
        """True if the gradient is gone, or something wrote zeros to it."""
        now = self.parameter.grad
        if now is None:
            return True
        written = now is not self.gradient() or _version(now) != self.version
        return written and not has_numbers(now)


@dataclass(slots=True)
class _Pass:
    """A backward pass that no step has read yet: where it was, and by optimizer the gradients it wrote."""

    evaluation: int
    micro_step: int
    seen: dict[str, list[_Seen]] = field(default_factory=dict)

    def is_cleared(self) -> bool:
        """True if all of them are cleared."""
        return all(one.is_cleared for of_optimizer in self.seen.values() for one in of_optimizer)


class _Tap(HoldsTensors):
    """The backward passes since the latest step.

    A pass is cleared if all gradients that it wrote are None or zeros when the next pass begins, and no optimizer has
    stepped with one of them. Of each optimizer a few parameters are followed: what a training clears in one go, it
    clears of all. Gradients that an engine moves elsewhere by itself are not known, and nothing is said of them.
    """

    def __init__(self, context: TapContext) -> None:
        super().__init__()
        self._context = context
        self._passes: list[_Pass] = []
        self._before: dict[str, list[tuple[Tensor, Tensor | None, int]]] = {}

    def before_backward(self) -> None:
        """Note the passes that were cleared, and the gradients that the next pass finds."""
        progress = self._context.sink.progress
        self._before.clear()
        is_flat = self._context.targets.layout.flat  # FSDP1 keeps gradients elsewhere between passes
        if not progress.observing or progress.chunk is not None or is_flat or is_capturing():
            return
        self._tell()
        leaves = self._context.targets.leaf_ids
        for name, tap in self._context.optimizers.items():
            held = _spread([one for one, _ in tap.selected() if id(one) in leaves])
            self._before[name] = [(one, one.grad, _version(one.grad)) for one in held if main_gradient(one) is None]

    def after_backward(self) -> None:
        """Note the gradients that the pass wrote."""
        progress = self._context.sink.progress
        found = _Pass(progress.evaluation, progress.micro_step)
        for name, held in self._before.items():
            written = [
                _Seen(parameter, ref(now), _version(now))
                for parameter, before, version in held
                if (now := parameter.grad) is not None and (now is not before or _version(now) != version)
            ]
            if written:
                found.seen[name] = written
        self._before.clear()
        if found.seen:  # what a pass adds to is cleared together with it
            self._passes = [one for one in self._passes if not one.seen.keys() <= found.seen.keys()]
            self._passes.append(found)

    def forget_tensors(self) -> None:
        """See `HoldsTensors`."""
        self._passes.clear()

    def after_call(self, name: str) -> None:
        """Forget the passes whose gradients a step may have read."""
        self._passes = [one for one in self._passes if name not in one.seen]

    def after_step(self, *_: object) -> None:
        """Forget all of them: the next step begins."""
        self._passes.clear()

    def _tell(self) -> None:
        """Record the last pass, if all passes were cleared, and what follows is of a later micro-step."""
        cleared = [one.is_cleared() for one in self._passes]
        if not any(cleared):
            return
        progress, last = self._context.sink.progress, self._passes[-1]
        self._passes = [one for one, gone in zip(self._passes, cleared, strict=True) if not gone]
        is_earlier = last.evaluation == progress.evaluation and last.micro_step < progress.micro_step
        if is_earlier and not self._passes:
            self._context.sink.emit(
                as_tensor(last.micro_step), phase="grad", path=ALL_GRADIENTS, slot="micro_step", stage=CLEARED
            )


def _spread(parameters: Sequence[Tensor]) -> Iterable[Tensor]:
    """A few of the parameters: the first, the last, and some in between."""
    if len(parameters) <= _MOST_HELD:
        return parameters
    last = len(parameters) - 1
    return [parameters[last * number // (_MOST_HELD - 1)] for number in range(_MOST_HELD)]


def _version(gradient: Tensor | None) -> int:
    """The counter of writes to a gradient's part on this rank; -1 without a gradient."""
    return -1 if gradient is None else version_of(local_part(gradient))
