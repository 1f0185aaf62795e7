"""The context that every tap is given when it is attached: the training, the sink and the events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from traindiff.core.settings import RecordSettings
from traindiff.core.shards import Piece, Shard
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.followed_modules import FollowedModules
from traindiff.observe.torch.hooks.other_threads import OtherThreads

if TYPE_CHECKING:
    from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
    from traindiff.observe.torch.session.observations import Containment
    from traindiff.observe.torch.session.targets import Targets


def emit_pieces(sink: Sink, tensor: Tensor, pieces: Iterable[Piece], **about: Any) -> None:
    """Hand some pieces of a tensor to the sink, as views.

    Args:
        sink: Receives the observations.
        tensor: The tensor, or one that is laid out like it.
        pieces: The pieces to observe.
        about: Arguments of `Sink.emit` but for path and shard.
    """
    for piece in pieces:
        part = tensor if piece.shard is None else elements(tensor, piece.first, piece.shard)
        sink.emit(part, path=piece.path, shard=piece.shard, **about)


def elements(tensor: Tensor, first: int, shard: Shard) -> Tensor:
    """A view of consecutive elements of a contiguous tensor, in the shape of their shard."""
    return tensor.detach().reshape(-1)[first : first + shard.size].view(shard.shape)


class Event(list[Callable[..., None]]):
    """The functions that are called at one event, in this order; who adds a function guards it."""

    def __call__(self, *about: Any) -> None:
        """Call them."""
        for function in self:
            function(*about)


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The events at which taps, and the session, have functions called.

    Attributes:
        before_forward: Before every forward pass of the root.
        after_forward: After it; also if only its end was seen.
        before_step: Before the first forward pass of each step that keeps gradients.
        before_update: When the optimizer that counts steps is called, unless a closure computes the gradients.
        before_any_step: When an optimizer is called, with its tap, unless a closure computes the gradients.
        after_step: After a step of the optimizer that counts them, before the next one begins.
        after_call: After every step of an optimizer, with its name, when it is known whether the next step is recorded.
        on_asking: Before a number is logged, and when an optimizer steps: where the training is must be known then.
        at_end: Before the last observations are written.
        at_backward: When a backward pass that can reach the model's parameters begins, before anything of it is seen.
        before_backward: Before such a backward pass runs, with the tensors it starts from, and with the leaves that
            alone are given gradients; None for all.
        after_backward: After it, also if it raised.
        on_inner_backward: Before a backward pass inside of another one, with the tensors it starts from (reentrant
            checkpointing).
        on_clipping: Before gradients are clipped, with the parameters that have them.
        on_gradients: Before something changes the gradients of an optimizer, or the optimizer reads them: with its tap,
            each tensor with the pieces of parameters in it, and whether the gradients contain the loss scale.
        before_part: Before a pipeline's schedule runs a half of a backward pass that is no call of `backward`: with the
            tensors it starts from for gradients of activations, with none for the gradients of parameters.
        after_part: After it, also if it raised.
        on_joined: When other ranks have taken further steps, and this one had no inputs for them: with their number.
        on_schedule: When a pipeline's schedule is about to run a batch, with it and with its stages on this rank.
    """

    before_forward: Event = field(default_factory=Event)
    after_forward: Event = field(default_factory=Event)
    before_step: Event = field(default_factory=Event)
    before_update: Event = field(default_factory=Event)
    before_any_step: Event = field(default_factory=Event)
    after_step: Event = field(default_factory=Event)
    after_call: Event = field(default_factory=Event)
    on_asking: Event = field(default_factory=Event)
    at_end: Event = field(default_factory=Event)
    at_backward: Event = field(default_factory=Event)
    before_backward: Event = field(default_factory=Event)
    after_backward: Event = field(default_factory=Event)
    on_inner_backward: Event = field(default_factory=Event)
    on_clipping: Event = field(default_factory=Event)
    on_gradients: Event = field(default_factory=Event)
    before_part: Event = field(default_factory=Event)
    after_part: Event = field(default_factory=Event)
    on_joined: Event = field(default_factory=Event)
    on_schedule: Event = field(default_factory=Event)


@dataclass(slots=True)
class UncountedWrites:
    """Writes to gradients after a backward pass that torch does not count, such as those through `.data`.

    Attributes:
        parameters: Ids of the parameters whose gradients were written so since the latest backward pass.
        to_any: The training writes so to several gradients at once; then no more is noticed of single ones.
    """

    parameters: set[int] = field(default_factory=set)
    to_any: bool = False

    def to(self, parameter: Tensor) -> bool:
        """True if the gradient of a parameter may have been written so."""
        return self.to_any or id(parameter) in self.parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class TapContext:
    """The training that is observed, and the sink for what is seen.

    Attributes:
        targets: The modules, parameters and buffers to observe.
        sink: Receives the observations, and guards hooks.
        containment: Guards hooks that clean up even after an error has disabled their tap.
        observe: Names of what is observed, with `param` for `update`; see `traindiff.core.tap_registry`.
        settings: How it is observed.
        before_every_step: Record parameters before each step, not only where the step before was not recorded.
        set_back: Parameters are set back to another run's between steps.
        batch_axis: Recognizes the batch axis.
        events: Where taps ask to be called.
        followed: The modules that have hooks of taps.
        optimizers: The optimizers that are followed, by name; may grow.
        other_threads: The threads that call the model beside the training.
        uncounted_writes: What is known of writes to gradients that torch does not count.
        describe: Put a value into `rank.json` under a name, and write that.
        undo: Closed when the session ends: what removes the taps.
    """

    targets: Targets
    sink: Sink
    containment: Containment
    observe: frozenset[str]
    settings: RecordSettings
    before_every_step: bool
    set_back: bool
    batch_axis: BatchAxis
    describe: Callable[[str, Any], None]
    events: Events = field(default_factory=Events)
    followed: FollowedModules = field(default_factory=FollowedModules)
    optimizers: dict[str, OptimizerTap] = field(default_factory=dict)
    other_threads: OtherThreads = field(default_factory=OtherThreads)
    uncounted_writes: UncountedWrites = field(default_factory=UncountedWrites)
    undo: ExitStack = field(default_factory=ExitStack)
