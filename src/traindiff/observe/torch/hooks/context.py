"""What every tap is given when it is attached."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from traindiff.core.shards import Piece, Regions, Shard
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.followed_modules import FollowedModules

if TYPE_CHECKING:
    from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap


class PiecesOf(Protocol):
    """Says what a tensor that an optimizer or autograd takes for a parameter holds of the model's."""

    def __call__(self, parameter: Tensor, size: int | None = None) -> tuple[Piece, ...] | None:
        """Its pieces: empty where it holds no element just now, None where it is none of the model's.

        Args:
            parameter: The tensor.
            size: Elements of its gradient, where that is asked for.
        """


def emit_pieces(sink: Sink, tensor: Tensor, pieces: Iterable[Piece], **about: Any) -> None:
    """Hand each piece of a tensor to the sink, as a view.

    Args:
        sink: Receives the observations.
        tensor: The tensor, or one that is laid out like it.
        pieces: What of it is observed.
        about: Arguments of `Sink.emit` but for path and shard.
    """
    for piece in pieces:
        part = tensor if piece.shard is None else elements(tensor, piece.first, piece.shard)
        sink.emit(part, path=piece.path, shard=piece.shard, **about)


def elements(tensor: Tensor, first: int, shard: Shard) -> Tensor:
    """A view of some elements of a contiguous tensor, one after the other, in the shape of their shard."""
    return tensor.detach().reshape(-1)[first : first + shard.size].view(shard.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Events:
    """What taps, and the session, have called at certain moments; each function is guarded by the one who adds it.

    Attributes:
        before_forward: Before every forward pass of the root.
        after_forward: When one has ended, or would have, had its beginning been seen.
        before_step: Before the first forward pass of each step that keeps gradients.
        after_step: When a step of the optimizer that counts them has ended, before the next one has begun.
        at_end: Before the last observations are written.
        at_backward: When a backward pass begins that can reach the model's parameters, before anything of it is seen.
        before_backward: Before a backward pass that can reach the model's parameters, with the tensors it starts from.
        after_backward: When it has ended, also by an error.
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
    """The training that is observed, and where to hand what is seen.

    Attributes:
        sink: Receives the observations, and guards hooks.
        observe: What is observed; see `traindiff.core.tap_registry`.
        evaluation: Whether forward passes without gradients are.
        batch_axis: Recognizes the batch axis.
        events: Where to ask to be called.
        root: The module that the training loop calls, or that holds those which it calls.
        roots: What it calls: the root, or some of what that holds.
        root_paths: Canonical path of each of these, by id.
        parts: What it may call instead of the one root, by canonical path.
        modules: Selected modules by canonical path.
        followed: The modules that have hooks of taps.
        parameters: What holds the selected parameters, by canonical path.
        buffers: What `root.get_buffer` calls the selected buffers, by canonical path.
        names: Canonical path of every parameter of the model by id, selected or not.
        find_leaves: Gives what autograd differentiates by for the selected parameters just now.
        gathering: Modules that compute with parameters which FSDP2 has gathered, by canonical path.
        first_name: Gives the path under which a parameter is filed.
        selects: Whether the parameter with this path is observed.
        pieces_of: What of which parameters a tensor holds.
        regions_of: Where an input or activation lies of which ranks hold parts, by path and slot.
        optimizers: The optimizers that are followed, by name; may grow.
        before_every_step: Whether parameters are recorded before each step, not only where the step before it was
            not recorded.
        counts_skipped: Whether what a loss scaler leaves out is a step.
        zoomed: Modules whose operators are recorded, by canonical path.
        is_own_hook: Whether what runs on this thread just now is a hook of traindiff's own.
        cleaning_up: As `sink.guarded`, for what is to run even after an error has disabled the tap.
        described: What taps say of this rank, for `rank.json`.
        write_described: Have that written.
    """

    sink: Sink
    observe: frozenset[str]
    evaluation: bool
    batch_axis: BatchAxis
    events: Events
    root: nn.Module
    roots: Sequence[nn.Module]
    root_paths: dict[int, str]
    parts: Mapping[str, nn.Module]
    modules: Mapping[str, nn.Module]
    followed: FollowedModules
    parameters: Mapping[str, nn.Parameter]
    buffers: Mapping[str, str]
    names: Mapping[int, str]
    find_leaves: Callable[[], Sequence[Tensor]]
    gathering: Mapping[str, nn.Module]
    first_name: Callable[[str], str]
    selects: Callable[[str], bool]
    pieces_of: PiecesOf
    regions_of: Callable[[Tensor, str, str], Regions | None]
    optimizers: Mapping[str, OptimizerTap]
    before_every_step: bool
    zoomed: Mapping[str, nn.Module]
    is_own_hook: Callable[[], bool]
    cleaning_up: Callable[[str, Callable[..., None]], Callable[..., Any]]
    described: dict[str, Any]
    write_described: Callable[[], None]
    counts_skipped: bool = True

    @property
    def leaves(self) -> Sequence[Tensor]:
        """What autograd differentiates by for the selected parameters."""
        return self.find_leaves()

    @property
    def several_roots(self) -> bool:
        """Whether the training loop calls several modules, whose inputs may be what others have returned."""
        return len(set(self.root_paths.values())) > 1

    @property
    def leaf_ids(self) -> Collection[int]:
        """Of all parameters, and of what FSDP2 has put in their places just now: where a graph may end."""
        if not self.gathering:
            return self.names.keys()
        gathered = {id(one) for module in self.gathering.values() for one in module.parameters()}
        return self.names.keys() | gathered
