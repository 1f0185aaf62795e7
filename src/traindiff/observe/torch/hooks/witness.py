"""Observe whether gradients follow from what their layers were given and returned: the witness of each gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn

from traindiff.core.kernels.torch_arrays import is_abstract
from traindiff.core.observation import WITNESS
from traindiff.core.shards import Piece, Shard
from traindiff.core.site import path_in_whole
from traindiff.core.torch_compat.autograd import inside_backward, keeps_saved_tensors_elsewhere, node_number, version_of
from traindiff.core.torch_compat.training import (
    ACCUMULATION_HOOKS,
    GRADIENT_HOOKS,
    has_communication_hook,
    own_parameters,
)
from traindiff.core.witness import EXPECTED, GIVEN, LAYERS, SIZE
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.torch.hooks.compiled import LayerObserver, tap_compiled_layer
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import Following, HeldHooks, takes_hooks
from traindiff.observe.torch.hooks.inert_on_copy import InertOnCopy, is_first_hook
from traindiff.observe.torch.hooks.nested import as_dense
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.witness.attention import AttentionCalls
from traindiff.observe.torch.witness.errors import KEPT_AWAY, OTHER_PART, NotWitnessedError
from traindiff.observe.torch.witness.given import given_vector
from traindiff.observe.torch.witness.graph import graph_of
from traindiff.observe.torch.witness.graph_uses import GraphUses
from traindiff.observe.torch.witness.layers import Layers, is_known, own_term
from traindiff.observe.torch.witness.node_hooks import changed_by_hooks, has_hooks
from traindiff.observe.torch.witness.normalized import Normalized, is_as_called
from traindiff.observe.torch.witness.pending import Expected, rooted
from traindiff.observe.torch.witness.probes import Probes
from traindiff.observe.torch.witness.use import Use

BESIDE = "the calls that were seen are not those of the backward pass ({seen} calls seen, {used} in its graph)"

OTHERWISE = "no backward pass that was seen contributed to it"

OF_NO_MODULE = "it belongs to no module of the model"

HOOKED = "it has a hook, which may change its gradient after it is added"

COMMUNICATION = "a communication hook of DistributedDataParallel reduces gradients"

BEFORE = "its gradient was not zero before the first backward pass that was recorded"

TOO_EARLY = "the training clipped or read its gradient before the last backward pass of the step"

JOINED = "a rank had inputs for a part of the step only"

_WHOLE = Shard.whole((SIZE,))


def attach(context: TapContext) -> None:
    """Check each gradient against what its inputs give (phase `grad`, stage `witness`).

    For each layer whose formula is known, two vectors: `expected` is added up from the inputs of the layer and the
    gradients of its outputs; `given` is read from the gradient of the parameter, before it is unscaled or clipped. The
    graph tells whether a parameter is used otherwise, too. What cannot be checked is recorded with the reason.
    """
    _Witness(context).attach()


class _Witness:
    """Adds up what is expected during backward passes, and writes both sides when gradients are read."""

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._sink = context.sink
        self._guarded = partial(context.sink.guarded, "witness")
        self._probes = Probes()
        self._layers = Layers(context.targets, self._probes)
        self._attention = AttentionCalls(self._guarded(self._called_in_attention))
        self._graph = GraphUses(self._layers, self._add_now, self._fail, self._guarded)
        self._expected: dict[str, Expected] = {}
        self._leaves: dict[int, Any] = {}  # nodes of the leaves of this backward pass, by the leaf's id
        self._calls: dict[int, list[int]] = {}  # leaves that a call uses, by the number of its output's node
        self._calls_before: dict[int, list[int]] = {}  # the same of the step before: a GAN's may end in this one
        self._inside: dict[str, list[Normalized]] = {}  # by module, inputs that activation checkpointing will bring
        self._late: list[Use] = []  # whose inputs had not come when the gradient did
        self._in_graph: Counter[int] = Counter()
        self._seen: Counter[int] = Counter()
        self._inputs: frozenset[int] | None = None
        self._running = False
        self._read: dict[str, set[int]] = {}  # by optimizer: ids of the tensors that were read in its step
        self._moments: dict[str, tuple[int, int]] = {}  # by optimizer: the step, and the evaluation, of these
        self._met: set[str] = set()  # paths of parameters whose gradient was looked at before a backward pass
        self._said: set[str] = set()  # paths of parameters of which it was said why they are not checked

    def attach(self) -> None:
        guarded, events = self._guarded, self._context.events
        events.before_backward.append(guarded(self._begin_backward))
        events.before_part.append(guarded(self._begin_part))
        events.on_inner_backward.append(guarded(self._inner_backward))
        end = self._context.containment.guarded("witness", self._end_backward, always=True)
        events.after_backward.append(end)
        events.after_part.append(end)
        events.on_gradients.append(guarded(self._gradients_are_read))
        modules = self._context.targets.modules
        taking = [(path, module) for path, module in modules.items() if takes_hooks(module)]
        how = Following(hook=self._hook, lost=lambda *_: None, grows=True)
        self._context.undo.enter_context(self._context.followed.follow(taking, how))
        events.on_joined.append(guarded(self._joined))
        self._context.undo.enter_context(self._attention.attach())
        self._graph.attach(self._context)

    def _hook(self, path: str, module: nn.Module, hooks: HeldHooks) -> None:
        if isinstance(module, nn.MultiheadAttention):
            self._attention.hook(path_in_whole(path), module, hooks, self._guarded)
        elif is_known(module):
            # In front of hooks that change the output, or divide it among ranks.
            hook = self._guarded(partial(self._called, path))
            hooks.before_forward(module, self._guarded(partial(self._called_again, path)), with_kwargs=True)
            hooks.after_forward(module, hook, with_kwargs=True, prepend=True)
            observer = LayerObserver(returned=self._guarded(partial(self._returned_in_compiled, path, module)))
            hooks.undo.enter_context(tap_compiled_layer(module, observer))

    def _called(
        self, path: str, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any], output: Any
    ) -> None:
        if not self._is_wanted(output) or not is_first_hook(module):
            return
        if inside_backward() and keeps_saved_tensors_elsewhere():
            return  # the second forward pass of activation checkpointing: gradients come back through the first one
        self._follow(path, output, lambda: self._layers.uses(path, module, args, named, output))

    def _called_again(self, path: str, module: nn.Module, args: tuple[Any, ...], named: Mapping[str, Any]) -> None:  # noqa: ARG002
        """Before a call: of the second forward pass of activation checkpointing, which brings inputs."""
        waiting = self._inside.get(path)
        if not waiting or not inside_backward():
            return
        given = next((one for one in (*args, *named.values()) if isinstance(one, Tensor)), None)
        if given is not None and len(waiting) == 1:
            waiting.pop().take(given)
        waiting.clear()  # which of several calls this repeats is not known

    def _called_in_attention(
        self, path: str, module: nn.Module, given: Tensor, weight: Tensor, bias: Tensor | None, output: Tensor
    ) -> None:
        if self._is_wanted(output):
            self._follow(
                path,
                output,
                lambda: self._attention.uses(self._layers, path, module, given, weight, bias, output),
            )

    def _is_wanted(self, output: Any) -> bool:
        return (
            self._sink.progress.observing and isinstance(output, Tensor) and output.requires_grad
            and not is_abstract(output) and not self._context.other_threads.is_this()
        )  # fmt: skip

    def _follow(self, path: str, output: Tensor, uses_of: Callable[[], Iterator[Use]]) -> None:
        node = output.grad_fn
        found: list[Use] = []
        with suppress(NotWitnessedError, UnsupportedTensorError):  # then the graph shows what uses its parameters
            found = list(uses_of())
        if not found or node is None:
            return
        for use in found:
            self._calls.setdefault(node_number(node), []).append(use.leaf)
            if use.normalized is not None and use.normalized.waits:
                self._inside.setdefault(path, []).append(use.normalized)
        # Hooks of the training on the tensor may change the gradient, and run before those on the node.
        returned = partial(self._returned, found, self._sink.progress.micro_step, output.output_nr)
        node.register_prehook(self._guarded(returned))

    def _returned(self, found: Sequence[Use], micro_step: int, number: int, gradients: Sequence[Tensor | None]) -> None:
        """The gradients of the outputs of a call are there."""
        gradient = gradients[number]
        if gradient is None:
            return
        if not self._running:
            return
        for use in found:
            if use.leaf in self._graph or (self._inputs is not None and use.leaf not in self._inputs):
                continue
            if not self._in_graph[use.leaf]:
                continue  # the second half of a backward pass visits it again
            self._seen[use.leaf] += 1
            if use.normalized is not None and use.normalized.waits:
                use.normalized.then = partial(self._add, use, micro_step, gradient)
                self._late.append(use)
            else:
                self._add(use, micro_step, gradient)

    def _returned_in_compiled(
        self,
        path: str,
        module: nn.Module,
        gradient: Tensor,
        given: Tensor | None,
        training: bool,  # noqa: FBT001
    ) -> None:
        """In compiled code, the gradient of the output of a call is there. The graph does not show its uses."""
        if not self._running:
            return
        if not is_as_called(module, training=training):
            for name, own in own_parameters(module).items():
                self._expect(self._layers.name_of(path, name, own)).sees_layers = False
            return
        x = gradient if given is None else given  # of a bias, nothing depends on it
        with suppress(NotWitnessedError, UnsupportedTensorError):
            for use in self._layers.uses(path, module, (x,), {}, gradient):
                if self._graph.takes_contributions(use.leaf):
                    self._expect(use.path).layers.add(self._sink.progress.micro_step, use, gradient)

    def _add(self, use: Use, micro_step: int, gradient: Tensor) -> None:
        try:
            self._expect(use.path).add(micro_step, use, gradient)
        except (NotWitnessedError, UnsupportedTensorError) as error:
            self._fail(use.path, str(error))

    def _add_now(self, use: Use, gradient: Tensor) -> None:
        self._add(use, self._sink.progress.micro_step, gradient)

    def _fail(self, path: str, reason: str) -> None:
        self._expect(path).reason = reason

    def _expect(self, path: str) -> Expected:
        """What is expected of a gradient now: from the beginning, if it was read since the last backward pass."""
        found = self._expected.get(path)
        if found is None:
            found = self._expected[path] = Expected()
        if found.is_read:
            found.begin()
        return found

    def _begin_part(self, roots: Sequence[Tensor]) -> None:
        self._begin_backward(roots, None, is_part=True)

    def _begin_backward(self, roots: Sequence[Tensor], inputs: Sequence[Any] | None, *, is_part: bool = False) -> None:
        if not self._sink.progress.observing:
            self._expected.clear()  # gradients now hold what was not seen
            self._met.clear()
            return
        self._inputs = None if inputs is None else frozenset(map(id, inputs))
        self._drop_cleared()
        self._in_graph, self._seen = Counter(), Counter()
        self._running = True
        self._follow_graph(roots, is_part=is_part)

    def _inner_backward(self, roots: Sequence[Tensor]) -> None:
        if self._running:
            self._follow_graph(roots)

    def _follow_graph(self, roots: Sequence[Tensor], *, is_part: bool = False) -> None:
        graph = graph_of(roots, self._leaves_of)
        self._leaves.update(graph.leaves)
        for leaf, places in graph.places.items():
            self._in_graph[leaf] += len(places)
        compressed = has_communication_hook(self._context.targets.root)
        changed_last = {leaf for leaf, node in graph.leaves.items() if has_hooks(node, before=True)}
        changed = self._hooked(GRADIENT_HOOKS) | changed_by_hooks(graph) | changed_last
        self._graph.follow(graph, self._inputs, changed, is_part=is_part)
        has_own = bool(self._context.targets.layout.data.engine)  # the engine's hooks reduce gradients
        added = set() if has_own else self._hooked(ACCUMULATION_HOOKS)
        for leaf, node in graph.leaves.items():
            if compressed or leaf in added or (not has_own and has_hooks(node, before=False)):
                for path in self._graph.paths(node):
                    self._fail(path, COMMUNICATION if compressed else HOOKED)
            elif leaf in changed_last:
                for path in self._graph.paths(node):
                    self._expect(path).edited = True  # after hooks on the tensor have seen what is contributed

    def _leaves_of(self, number: int) -> Sequence[int]:
        """The leaves that the call with this node uses, in this step or in the one before."""
        return self._calls.get(number, ()) or self._calls_before.get(number, ())

    def _hooked(self, attribute: str) -> set[int]:
        """Ids of leaves that have hooks of other code, by the attribute that holds them."""
        return {
            id(one)
            for one in self._context.targets.leaves
            if any(not isinstance(hook, InertOnCopy) for hook in (getattr(one, attribute, None) or {}).values())
        }

    def _end_backward(self) -> None:
        if not self._running:
            return
        self._running = False
        self._inside.clear()
        for use in self._late:
            if use.normalized is not None and use.normalized.waits:
                self._fail(use.path, KEPT_AWAY)
        self._late.clear()
        for leaf, node in self._leaves.items():
            used, seen = self._in_graph[leaf], self._seen[leaf]
            if used != seen and leaf not in self._graph and (self._inputs is None or leaf in self._inputs):
                for path in self._graph.paths(node):
                    self._fail(path, BESIDE.format(used=used, seen=seen))
        self._leaves.clear()
        self._graph.end()
        for parameter, pieces in self._selected():
            self._note_left(parameter, pieces)

    def _selected(self) -> Iterator[tuple[Tensor, Sequence[Piece]]]:
        """The parameters that optimizers hold, and those whose optimizer is not known before its first step."""
        targets, held = self._context.targets, set[str]()
        for tap in self._context.optimizers.values():
            for parameter, pieces in tap.selected():
                held.update(piece.path for piece in pieces)
                yield parameter, pieces
        for leaf in () if targets.optimizers else targets.leaves:
            pieces = targets.pieces_of(leaf) or ()
            if rest := [one for one in pieces if one.path not in held and targets.selects(one.path)]:
                yield leaf, rest

    def _note_left(self, parameter: Tensor, pieces: Iterable[Piece]) -> None:
        """Note the gradient as the backward pass leaves it."""
        if (gradient := parameter.grad) is None:
            return
        for piece in pieces:
            if (expected := self._expected.get(piece.path)) is not None:
                expected.left[id(parameter)] = gradient, version_of(gradient)

    def _drop_cleared(self) -> None:
        """Forget what belongs to gradients that were cleared since the last backward pass."""
        for parameter, pieces in self._selected():
            for piece in pieces:
                expected = self._expected.get(piece.path)
                if expected is None:
                    if piece.path not in self._met and _is_nonzero(parameter.grad):
                        self._expected[piece.path] = Expected(reason=BEFORE)
                    self._met.add(piece.path)
                    continue
                left = None if expected.is_read else expected.left.get(id(parameter))
                if left is None:
                    continue
                if _is_cleared(parameter.grad, *left):
                    expected.begin()
                else:
                    expected.edited |= _is_written(parameter.grad, *left)

    def _gradients_are_read(
        self,
        tap: OptimizerTap,
        held: Sequence[tuple[Tensor, Sequence[Piece]]],
        scaled: bool,  # noqa: FBT001
    ) -> None:
        """An optimizer reads its gradients, or something changes them before."""
        progress = self._sink.progress
        moment = progress.number_of(tap.name), progress.evaluation
        if moment != self._moments.get(tap.name):
            self._moments[tap.name] = moment
            self._read[tap.name] = set()
            if progress.evaluation:
                self._said.clear()  # rules look at the last evaluation of a step
        earlier = self._read[tap.name]
        fresh = [
            (parameter, pieces, gradient)
            for parameter, pieces in held
            if id(parameter) not in earlier and (gradient := tap.gradient_of(parameter)) is not None
        ]
        self._say_what_came_later(tap, [one for one in held if id(one[0]) in earlier])
        if not fresh:
            return
        earlier.update(id(parameter) for parameter, _, _ in fresh)
        if tap.name == progress.optimizer:
            self._calls, self._calls_before = {}, self._calls
        read = self._read_with(tap, {piece.path for _, pieces, _ in fresh for piece in pieces})
        with self._sink.together():
            self._emit_expected(tap, read)
            for parameter, pieces, gradient in fresh:
                self._emit_given(tap, parameter, gradient, pieces, scaled=scaled)
        for path in read:
            self._expected[path].is_read = True

    def _joined(self, steps: int) -> None:  # noqa: ARG002
        """This rank took no step with its gradients: whether they count in those of the others is unknown."""
        for tap in self._context.optimizers.values():
            for path in self._read_with(tap, {piece.path for _, pieces in tap.selected() for piece in pieces}):
                self._say(tap, path, JOINED)
                self._expected[path].is_read = True

    def _say_what_came_later(self, tap: OptimizerTap, held: Sequence[tuple[Tensor, Sequence[Piece]]]) -> None:
        """Of gradients that were read before in this step: those to which backward passes have contributed since."""
        for _, pieces in held:
            for piece in pieces:
                expected = self._expected.get(piece.path)
                if expected is not None and not expected.is_read and not expected.is_empty:
                    self._say(tap, piece.path, TOO_EARLY)
                    expected.is_read = True

    def _read_with(self, tap: OptimizerTap, own: Collection[str]) -> list[str]:
        """The parameters whose gradients an optimizer reads, on this rank or on another one, and which are expected."""
        others = {
            piece.path
            for other in self._context.optimizers.values()
            if other is not tap
            for _, pieces in other.selected()
            for piece in pieces
        }
        return [
            path
            for path, expected in self._expected.items()
            if not expected.is_read and (path in own or path not in others)
        ]

    def _emit_expected(self, tap: OptimizerTap, paths: Iterable[str]) -> None:
        found = []
        for path in paths:
            expected = self._expected[path]
            if expected.reason:
                self._say(tap, path, expected.reason)
            else:
                found += [(path, EXPECTED, *one) for one in expected.terms.vectors()]
                if expected.sees_layers:
                    found += [(path, LAYERS, *one) for one in expected.layers.vectors()]
        data = self._context.targets.layout.data
        for (path, slot, micro_step, is_own, _), vector in zip(found, rooted([one[-1] for one in found]), strict=True):
            term = own_term(data.term, data.num_terms) if is_own else data.term
            self._sink.emit(
                vector, phase="grad", stage=WITNESS, path=path, slot=slot, micro_step=micro_step,
                optimizer=tap.name, shard=_WHOLE, merge="sum", term=term,
            )  # fmt: skip

    def _emit_given(
        self, tap: OptimizerTap, parameter: Tensor, gradient: Tensor, pieces: Iterable[Piece], *, scaled: bool
    ) -> None:
        for piece in pieces:
            expected = self._expected.get(piece.path)
            if expected is None:
                if piece.path not in self._said:
                    is_of_model = piece.path in self._context.targets.paths
                    self._say(tap, piece.path, OTHERWISE if is_of_model else OF_NO_MODULE)
                continue
            if expected.reason or not expected.terms:
                continue
            left = expected.left.get(id(parameter))
            edited = expected.edited or (left is not None and _is_written(gradient, *left))
            edited |= self._context.uncounted_writes.to(parameter)
            found = given_vector(
                self._probes, self._context.targets.layout, gradient, piece, edited=edited,
                contributed=expected.contributed,
            )  # fmt: skip
            if found is None:
                self._say(tap, piece.path, OTHER_PART)
                continue
            vector, term = found
            self._sink.emit(
                vector, phase="grad", stage=WITNESS, path=piece.path, slot=GIVEN, optimizer=tap.name, shard=_WHOLE,
                merge="sum", term=term, micro_step=0, scaled=scaled,
            )  # fmt: skip

    def _say(self, tap: OptimizerTap, path: str, reason: str) -> None:
        """Record why the gradient of a parameter is not checked."""
        self._said.add(path)
        self._sink.unobserved(reason, phase="grad", stage=WITNESS, path=path, slot=EXPECTED, optimizer=tap.name)


def _is_cleared(gradient: Tensor | None, left: Tensor, version: int) -> bool:
    """True if a gradient was removed, or set to zero, since a backward pass has left it."""
    return gradient is None or (_is_written(gradient, left, version) and not _is_nonzero(gradient))


def _is_written(gradient: Tensor | None, left: Tensor, version: int) -> bool:
    """True if something wrote to a gradient, or replaced it, since a backward pass has left it."""
    return gradient is not left or version_of(gradient) != version


def _is_nonzero(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(as_dense(gradient.detach()).any())
