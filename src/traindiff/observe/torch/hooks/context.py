"""The context that every tap is given when it is attached: the training, the sink and the events."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from traindiff.core.shards import Piece, Shard
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.followed_modules import FollowedModules

if TYPE_CHECKING:
    from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
    from traindiff.observe.torch.session.observations import Containment
    from traindiff.observe.torch.session.targets import Targets


class PiecesOf(Protocol):
    """Tells which of the model's elements are in a tensor that an optimizer or autograd takes for a parameter."""

    def __call__(self, parameter: Tensor, size: int | None = None) -> tuple[Piece, ...] | None:
        """The pieces of a tensor: empty if it holds no element now, None if it is none of the model's.

        Args:
            parameter: The tensor.
            size: The number of elements of its gradient, to ask about that.
        """


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """The functions that taps, and the session, have called at each event; who adds a function guards it.

    Attributes:
        before_forward: Before every forward pass of the root.
        after_forward: After it; also if only its end was seen.
        before_step: Before the first forward pass of each step that keeps gradients.
        after_step: After a step of the optimizer that counts them, before the next one begins.
        at_end: Before the last observations are written.
        at_backward: When a backward pass that can reach the model's parameters begins, before anything of it is seen.
        before_backward: Before such a backward pass runs, with the tensors it starts from.
        after_backward: After it, also if it raised.
        on_schedule: When a pipeline's schedule is about to run a batch, with it and with its stages on this rank.
    """

    before_forward: list[Callable[[], None]] = field(default_factory=list)
    after_forward: list[Callable[[], None]] = field(default_factory=list)
    before_step: list[Callable[[], None]] = field(default_factory=list)
    after_step: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    at_backward: list[Callable[[], None]] = field(default_factory=list)
    before_backward: list[Callable[[Sequence[Tensor]], None]] = field(default_factory=list)
    after_backward: list[Callable[[], None]] = field(default_factory=list)
    on_schedule: list[Callable[[Any, list[Any]], None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class TapContext:
    """The training that is observed, and the sink for what is seen.

    Attributes:
        targets: The modules, parameters and buffers to observe.
        sink: Receives the observations, and guards hooks.
        containment: Guards hooks that clean up even after an error has disabled their tap.
        observe: Names of what is observed; see `traindiff.core.tap_registry`.
        evaluation: Observe forward passes without gradients, too.
        counts_skipped: Count a step that a loss scaler leaves out as a step.
        before_every_step: Record parameters before each step, not only where the step before was not recorded.
        batch_axis: Recognizes the batch axis.
        events: Where taps ask to be called.
        followed: The modules that have hooks of taps.
        optimizers: The optimizers that are followed, by name; may grow.
        describe: Put a value into `rank.json` under a name, and write that.
        root_paths: Canonical path of each root, by id; changes where a root is replaced.
        parts: The modules that the training loop may call instead of the one root, by canonical path.
        gathering: Modules that compute with parameters which FSDP2 has gathered, by canonical path.
    """

    targets: Targets
    sink: Sink
    containment: Containment
    observe: frozenset[str]
    evaluation: bool
    counts_skipped: bool
    before_every_step: bool
    batch_axis: BatchAxis
    optimizers: Mapping[str, OptimizerTap]
    describe: Callable[[str, Any], None]
    events: Events = field(default_factory=Events)
    followed: FollowedModules = field(default_factory=FollowedModules)
    root_paths: dict[int, str] = field(init=False)
    parts: Mapping[str, nn.Module] = field(init=False)
    gathering: Mapping[str, nn.Module] = field(init=False)

    def __post_init__(self) -> None:
        """Look up what takes a walk through the model, once."""
        for name in ("root_paths", "parts", "gathering"):
            object.__setattr__(self, name, getattr(self.targets, name))

    @property
    def several_roots(self) -> bool:
        """True if the training loop calls several modules, whose inputs may be outputs of others."""
        return len(set(self.root_paths.values())) > 1

    @property
    def leaf_ids(self) -> Collection[int]:
        """Ids of all parameters, and of those that FSDP2 has swapped in: the possible leaves of the graph."""
        names = self.targets.names
        if not self.gathering:
            return names.keys()
        return names.keys() | {id(one) for module in self.gathering.values() for one in module.parameters()}
