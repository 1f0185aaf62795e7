"""Check parameters at the operations that use them, where these are not calls of layers that are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from traindiff.core.shards import Piece
from traindiff.core.torch_compat.autograd import result_shape
from traindiff.core.witness import PROBES
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.gathered_parameters import follow_gathered
from traindiff.observe.torch.hooks.nested import as_dense
from traindiff.observe.torch.sharding.distributed_tensor import is_distributed
from traindiff.observe.torch.witness.errors import OTHER_PART, UNREADABLE, NotWitnessedError
from traindiff.observe.torch.witness.given import given_vector
from traindiff.observe.torch.witness.graph import Graph, Place
from traindiff.observe.torch.witness.kept_elsewhere import KeptElsewhere
from traindiff.observe.torch.witness.layers import Layers
from traindiff.observe.torch.witness.operations import Operation, operation_at
from traindiff.observe.torch.witness.use import Use, contributed

_CALLS, _OPERATIONS, _LEAF = "calls", "operations", "leaf"
"""Ways to follow a leaf: by calls of layers, by the operations that use it, by what is added to its gradient."""

APART = "a pipeline's schedule computes its gradient apart from those of activations"

SEVERAL_WAYS = "reentrant activation checkpointing uses it in several ways"


class GraphUses:
    """Follows the leaves of a graph that operations use beside calls that were followed.

    If all operations on a leaf are known, what they contribute follows from the gradients of their results and from
    what they have saved. Else what the backward pass contributes to the leaf is taken as it is.

    Args:
        layers: The parameters, and their signs.
        add: Adds up what is expected. Is given a use, and the gradient of the operation's result.
        fail: Called with the path of a parameter that cannot be witnessed, and why.
        guarded: Makes hooks harmless.
    """

    def __init__(
        self, layers: Layers, add: Callable[[Use, Tensor], None], fail: Callable[[str, str], None],
        guarded: Callable[..., Any],
    ) -> None:  # fmt: skip
        self._layers = layers
        self._add = add
        self._fail = fail
        self._guarded = guarded
        self._kept_elsewhere = KeptElsewhere()
        self._gathered: dict[int, str] = {}  # paths of the parameters that FSDP2 gathers, by the id of the tensor
        self._hooks: list[Any] = []
        self._missing: Counter[str] = Counter()  # operations on parameters that must run, and did not
        self._ways: dict[int, str] = {}  # how each leaf of this backward pass is followed

    def attach(self, context: TapContext) -> None:
        """Begin."""
        context.undo.enter_context(self._kept_elsewhere.attach())
        follow_gathered(context, "witness", self._note_gathered)

    def __contains__(self, leaf: int) -> bool:
        """True if a leaf is followed here, so calls of layers that use it do not count."""
        return self._ways.get(leaf, _CALLS) != _CALLS

    def takes_contributions(self, leaf: int) -> bool:
        """True if what this backward pass contributes to a leaf is taken as it is."""
        return self._ways.get(leaf) == _LEAF

    def follow(
        self, graph: Graph, inputs: Collection[int] | None, changed: Collection[int], *, is_part: bool = False
    ) -> None:
        """Follow the leaves of a graph until `end` is called.

        Args:
            graph: The graph of the backward pass that begins, or of a part of it that reentrant checkpointing runs.
            inputs: Ids of the leaves for which it is; None for all.
            changed: Ids of leaves whose gradients hooks change before they are added.
            is_part: It is for gradients of activations alone. Nothing reaches the leaves, and each operation on a leaf
                must run, or what it contributes is not seen.
        """
        for leaf, node in graph.leaves.items():
            if (inputs is not None and leaf not in inputs) or not (pieces := self._pieces(node.variable)):
                continue
            before = self._ways.get(leaf)
            if before == _LEAF:
                continue
            operations: list[Operation] = []
            way = _LEAF if leaf in changed else _CALLS
            if way == _CALLS and graph.followed[leaf] != len(graph.places.get(leaf, ())):
                operations = self._operations(node, pieces, graph.places.get(leaf, ()))
                way = _OPERATIONS if operations else _LEAF
            if before not in (None, way) or (is_part and way == _LEAF):
                for piece in pieces:
                    self._fail(piece.path, APART if is_part else SEVERAL_WAYS)
                continue
            self._ways[leaf] = way
            if way == _LEAF:
                self._hook(node, partial(self._at_leaf, node.variable))
            for operation in operations:
                self._hook(operation.place.node, partial(self._at_operation, operation, pieces[0].path, node.variable))
            if is_part and operations:
                self._missing[pieces[0].path] = len(operations)

    def _hook(self, node: Any, hook: Callable[..., None]) -> None:
        self._hooks.append(node.register_prehook(self._guarded(hook)))

    def end(self) -> None:
        """The backward pass has ended."""
        hooks, self._hooks = self._hooks, []
        self._ways.clear()
        for hook in hooks:
            hook.remove()
        missing, self._missing = self._missing, Counter()
        for path, count in missing.items():
            if count > 0:
                self._fail(path, APART)

    def paths(self, leaf: Any) -> list[str]:
        """Paths of the observed parameters in a leaf, given its node."""
        return [piece.path for piece in self._pieces(leaf.variable)]

    def _note_gathered(self, path: str, parameter: Tensor) -> None:
        self._gathered[id(parameter)] = path

    def _pieces(self, tensor: Tensor, size: int | None = None) -> Sequence[Piece]:
        """The observed parameters in a leaf."""
        targets = self._layers.targets
        found = targets.pieces_of(tensor, size)
        if found is None:
            found = (Piece(path=self._gathered[id(tensor)]),) if id(tensor) in self._gathered else ()
        return [piece for piece in found if piece.path in targets.paths and targets.selects(piece.path)]

    def _operations(self, leaf: Any, pieces: Sequence[Piece], places: Sequence[Place]) -> list[Operation]:
        """The operations on a leaf; none if one of them is not known."""
        tensor = leaf.variable
        if (
            is_distributed(tensor) or tensor.is_complex() or len(pieces) != 1 or pieces[0].shard is not None
            or tuple(tensor.shape) != result_shape(leaf, 0)  # its engine has taken the elements away
        ):  # fmt: skip
            return []
        found = []
        for place in places:
            operation = operation_at(place)
            if operation is None or (operation.reads and self._kept_elsewhere(place.node)):
                return []
            found.append(operation)
        return found

    def _at_operation(
        self, operation: Operation, path: str, tensor: Tensor, gradients: Sequence[Tensor | None]
    ) -> None:
        self._missing[path] -= 1
        if (gradient := gradients[0]) is None:
            return
        try:
            held = self._layers.held_tensor(path, tensor)
            assert held is not None  # or it had no piece
            self._add(operation.use(self._layers, held, gradient), gradient)
        except NotWitnessedError as error:
            self._fail(path, str(error))
        except UnsupportedTensorError:
            self._fail(path, UNREADABLE)

    def _at_leaf(self, tensor: Tensor, gradients: Sequence[Tensor | None]) -> None:
        if (gradient := gradients[0]) is None:
            return
        gradient = as_dense(gradient.detach())
        for piece in self._pieces(tensor, gradient.numel()):
            try:
                self._add(self._contribution(tensor, gradient, piece), gradient)
            except (NotWitnessedError, UnsupportedTensorError) as error:
                self._fail(piece.path, str(error))

    def _contribution(self, tensor: Tensor, gradient: Tensor, piece: Piece) -> Use:
        if gradient.is_complex():
            raise NotWitnessedError("it is complex")
        held = self._layers.held_tensor(piece.path, tensor, gradient)
        assert held is not None  # or it had no piece
        found = given_vector(self._layers.probes, self._layers.targets.layout, gradient, piece, edited=False)
        if found is None:
            raise NotWitnessedError(OTHER_PART)
        return contributed(held, gradient, found[0][:PROBES], piece)
