"""Observe the inputs of the root module, and random state around its forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.observation import ITSELF, UNSEEN
from traindiff.core.torch_compat.autograd import inside_backward
from traindiff.core.torch_compat.training import running_calls
from traindiff.observe.common.batch_axis import batch_first
from traindiff.observe.common.progress import Progress
from traindiff.observe.torch.hooks.compiled import CallObserver, tap_compiled_calls
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import Following, HeldHooks, takes_hooks
from traindiff.observe.torch.hooks.nested import tensors
from traindiff.observe.torch.hooks.running_passes import Pass, RunningPasses


def given_to_training(inputs: Sequence[tuple[str, Tensor]], progress: Progress, *, several: bool) -> list[str]:
    """Slots of the inputs of a module that are part of the batch.

    If the loop calls one module only, all its inputs are. Otherwise an input with a graph was computed. So may be a
    floating-point tensor if another module was called since the last backward pass: the images of a generator that
    its discriminator is given. The batch must be equal to the bit in two runs; what was computed need not.

    Args:
        inputs: The inputs by slot.
        progress: Where the training is, before the call that takes them is counted.
        several: The training loop calls several modules.
    """
    if not several:
        return [slot for slot, _ in inputs]
    follows_another = progress.forward_done and not progress.backward_done
    return [
        slot
        for slot, tensor in inputs
        if tensor.grad_fn is None and not (follows_another and tensor.is_floating_point())
    ]


ELSEWHERE = "the model was called on another thread than that of the training"
"""Why a forward pass was not observed."""

COPY = "a shallow copy of the module was called, which shares its hooks, and not the module itself"
"""Why a forward pass was not observed."""

Reference = Callable[[], nn.Module | None]
"""Gives the module on which a hook was put, as long as there is one."""

_UNSEEN_PHASES = (("batch", ""), ("forward", ""), ("loss", ""), ("backward", ""), ("grad", "micro"))
"""Phases and stages that are unknown, or misplaced, in a step whose forward pass was not seen."""


def attach(context: TapContext) -> None:
    """Follow the root's forward passes."""
    RootForwardTap(context).attach()


class RootForwardTap:
    """Follows the root's forward passes: they delimit micro-steps and carry the batch.

    If `batch` is observed, the root's tensor inputs (phase `batch`) and the state of torch's random number generators
    before and after every forward pass are recorded; if not, only progress is kept. If the training loop calls several
    modules, a call inside another is part of that one's pass, and tensors that they seem to hand to each other are
    activations (phase `forward`), not the batch. That it calls several may show only when a step begins with a part of
    the model: from then on the parts are followed, too.

    Args:
        context: The training.
    """

    def __init__(self, context: TapContext) -> None:
        self._context = context
        self._sink = context.sink
        self._batch_axis = context.batch_axis
        self._observe_batch = "batch" in context.observe
        self._running = RunningPasses(self._left)
        self._was_interrupted = False  # the latest pass
        self._others = context.other_threads
        self._ignored: set[bool] = set()  # whether passes of other threads in this step kept gradients
        self._num_passes = 0  # since the latest backward pass, or the beginning of the step
        self._most_passes = 0  # before any backward pass so far
        self._first = -1, ""  # the number of steps until now, and the path of the module that was called first since
        self._calls_several = context.targets.several_roots
        # An error in looking at the batch must not stop the counting of micro-steps.
        self._observe_inputs = self._sink.guarded("batch", self._inputs)
        self._observe_end = self._sink.guarded("batch", partial(self._random_state, "after"))

    def attach(self) -> None:
        """Attach the hooks that follow forward and backward passes of the roots."""
        targets, follow, undo = self._context.targets, self._context.followed.follow, self._context.undo
        roots = [(targets.root_paths[id(root)], root) for root in targets.roots]
        undo.enter_context(follow(roots, Following(hook=self._hook, lost=self._lost, calls_follow=True)))
        parts = [(path, part) for path, part in targets.parts.items() if takes_hooks(part)]
        undo.enter_context(follow(parts, Following(hook=self._hook_part, lost=self._lost_part, calls_follow=True)))
        self._context.events.on_asking.append(self._sink.guarded("root_forward", self._settle))
        self._context.events.at_backward.insert(0, self._sink.guarded("root_forward", self._running.unwind))

    def _hook(self, path: str, root: nn.Module, hooks: HeldHooks) -> None:
        guarded = partial(self._sink.guarded, "root_forward")
        self._context.targets.root_paths[id(root)] = path
        begin, end = guarded(partial(self._begin, path, ref(root))), guarded(partial(self._end, ref(root)))
        hooks.before_forward(root, begin, with_kwargs=True, prepend=True)
        hooks.after_forward(root, end, with_kwargs=True, always_call=True)
        compiled = CallObserver(begin=guarded(partial(self._begin_with, path)), end=guarded(self._end_of))
        hooks.undo.enter_context(tap_compiled_calls(root, compiled))

    def _hook_part(self, path: str, part: nn.Module, hooks: HeldHooks) -> None:
        guarded = partial(self._sink.guarded, "root_forward")
        begin = guarded(partial(self._begin_part, path, ref(part)), idle=self._has_begun)
        end = guarded(partial(self._end_part, ref(part)), idle=self._is_whole)
        hooks.before_forward(part, begin, with_kwargs=True, prepend=True)
        hooks.after_forward(part, end, with_kwargs=True, always_call=True)

    def _lost(self, path: str, why: str) -> None:  # noqa: ARG002
        progress = self._sink.progress
        if not why or self._has_seen_all():
            return
        progress.forward_done |= torch.is_grad_enabled()
        for phase, stage in _UNSEEN_PHASES if progress.observing else ():
            self._sink.unobserved(f"{UNSEEN}: {why}", phase=phase, path=ITSELF, slot="root_forward", stage=stage)

    def _has_seen_all(self) -> bool:
        """True if as many passes were seen since the last backward pass as ever before one."""
        begins = self._sink.progress.backward_done or not self._sink.progress.forward_done
        return not begins and 0 < self._most_passes <= self._num_passes

    def _lost_part(self, path: str, why: str) -> None:
        if self._calls_several:
            self._lost(path, why)

    def _is_whole(self) -> bool:
        """True as long as the loop calls the model, and not its parts."""
        return not (self._calls_several or self._others.inside)

    def _has_begun(self) -> bool:
        """True if the call of a part does not show that the loop calls parts: the step has begun otherwise."""
        progress = self._sink.progress
        begun = not self._calls_several and (progress.in_forward or progress.forward_done)
        return begun and get_ident() == self._others.training

    def _begin_part(
        self,
        path: str,
        hooked: Reference,
        part: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        progress = self._sink.progress
        if not self._calls_several:
            if self._is_beside_training(hooked, part):
                self._others.enter()
                return
            if (
                (progress.in_forward or progress.forward_done)
                or inside_backward()
                or progress.hidden
                or progress.chunk is not None
                or not torch.is_grad_enabled()
            ):
                return
            if not all(self._context.followed.is_intact(root) for root in self._context.targets.roots):
                return  # a root called the part, and the hooks of the root are gone
            self._calls_several = True
        self._begin(path, hooked, part, args, kwargs)

    def _is_beside_training(self, hooked: Reference, part: nn.Module) -> bool:
        """True if another thread evaluates a part of the model, and not for the training."""
        elsewhere = get_ident() != self._others.training and not inside_backward()
        return elsewhere and hooked() is part and (self._others.is_this() or not torch.is_grad_enabled())

    def _end_part(self, hooked: Reference, part: nn.Module, *_: Any) -> None:
        if self._calls_several or self._others.is_this():
            self._end(hooked, part)

    def _begin(
        self,
        path: str,
        hooked: Reference,
        root: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if hooked() is not root:
            if torch.is_grad_enabled() and not (self._running or inside_backward()):
                self._lost(path, COPY)
            return
        positional, named = list(tensors(args, "input")), list(tensors(kwargs, "input"))
        self._begin_with(
            path,
            [*positional, *named],
            evaluating=not torch.is_grad_enabled(),
            handed_on=len(positional),
            root=root,
        )

    def _begin_with(
        self,
        path: str,
        inputs: Sequence[tuple[str, Tensor]],
        *,
        evaluating: bool,
        handed_on: int = 0,
        root: nn.Module | None = None,
    ) -> None:
        progress, chunk = self._sink.progress, self._sink.progress.chunk
        if progress.hidden:
            return
        if not inside_backward():
            self._running.unwind(beginning=root)
            if get_ident() != self._others.training and not self._trains_here(evaluating=evaluating):
                return
        if self._is_nested():
            self._running.begin(root, None)
            progress.given = frozenset()
            return
        self._context.events.before_forward()
        if not evaluating and not progress.forward_done and progress.batch is None:
            if chunk is None:
                self._context.events.before_step()
            else:
                with progress.before_all_chunks():
                    self._context.events.before_step()
        if not evaluating:
            self._count_pass()
        given = given_to_training(inputs, progress, several=self._calls_several)
        progress.given = frozenset(given)
        forward = progress.forward(
            self._batch_axis.of_batch([self._shape(*one) for one in inputs]),
            evaluating=evaluating,
            continues=self._calls_several and not evaluating and self._continues(path),
        )
        forward.__enter__()
        self._running.begin(root, forward)
        self._was_interrupted = False
        if self._observes:
            # Tensors that a pipeline stage hands to the next are no inputs of the whole model.
            self._observe_inputs(path, inputs if chunk is None or chunk.is_first else inputs[handed_on:])

    def _trains_here(self, *, evaluating: bool) -> bool:
        """True if a pass on another thread than the last one is part of the training, which has moved to this thread.

        It is if it keeps gradients, and begins a step or a micro-step, or if the pass before was interrupted.
        """
        progress = self._sink.progress
        if len([*running_calls()]) < 2:  # this call, or none that the stack shows
            self._others.forget_this()
        begins = progress.backward_done or not progress.forward_done or self._was_interrupted
        if begins and not (evaluating or self._running or self._others.is_this()):
            self._others.take_over()
            return True
        self._others.enter()
        self._ignored.add(not evaluating)
        return False

    def _continues(self, path: str) -> bool:
        """True if a call, after a backward pass, of the module with this path begins no micro-step.

        A call of the module with which the step began does. Gradients are accumulated like this: each micro-batch goes
        the same way, and its observations merge with those of the others. In a GAN another module may come next, or
        another optimizer may have stepped in between: then the call is a further part of the same micro-step.
        """
        steps = sum(self._sink.progress.steps.values())
        if steps != self._first[0]:
            self._first = steps, path
            return True
        return path != self._first[1]

    def _count_pass(self) -> None:
        if self._sink.progress.backward_done or not self._sink.progress.forward_done:
            self._most_passes = max(self._most_passes, self._num_passes)
            self._num_passes = 0
        self._num_passes += 1

    def _end(self, hooked: Reference, root: nn.Module, *_: Any) -> None:
        if hooked() is root:
            self._end_of(root)

    def _end_of(self, root: nn.Module | None = None) -> None:
        """End a forward pass: that of a module, or the one of which compiled code has told."""
        if self._sink.progress.hidden or (self._others.is_this() and self._others.leave()):
            return
        ended = self._running.end(root)
        if ended is None:  # the hooks were attached inside a forward pass, or the hook before it is gone
            self._context.events.after_forward()
        elif ended.inside is not None:
            observes = self._observes and not self._sink.progress.evaluating
            ended.inside.__exit__(None, None, None)
            if observes:
                self._observe_end()
            self._context.events.after_forward()

    def _left(self, ended: Pass) -> None:
        """A forward pass has ended, and no hook was called then."""
        progress = self._sink.progress
        self._was_interrupted = True
        if ended.inside is None:
            return
        if self._observes and not progress.evaluating and progress.chunk is None:
            progress.next_call("", "rng after")  # the state after it is unknown
        ended.inside.__exit__(None, None, None)

    def _settle(self) -> None:
        """Forget passes that an interrupt has ended, and say what other threads have called."""
        self._running.unwind(without_frame=True)
        if self._ignored and not self._others.is_this():
            ignored, self._ignored = self._ignored, set()
            self._say_ignored(kept_gradients=True in ignored)

    def _say_ignored(self, *, kept_gradients: bool) -> None:
        if not self._sink.progress.observing:
            return
        evaluation = [("forward", "evaluation")] if self._context.settings.evaluation else []
        for phase, stage in _UNSEEN_PHASES if kept_gradients else evaluation:
            self._sink.unobserved(f"{UNSEEN}: {ELSEWHERE}", phase=phase, path=ITSELF, slot="root_forward", stage=stage)

    @property
    def _observes(self) -> bool:
        progress = self._sink.progress
        return (
            progress.observing
            and self._observe_batch
            and (self._context.settings.evaluation or not progress.evaluating)
        )

    def _is_nested(self) -> bool:
        """True if a call of a root is part of another root's: made by it, or repeated in the backward pass."""
        return self._calls_several and (bool(self._running) or inside_backward())

    def _inputs(self, path: str, inputs: Sequence[tuple[str, Tensor]]) -> None:
        progress = self._sink.progress
        stage = "evaluation" if progress.evaluating else ""
        call = progress.next_call(path, f"inputs {stage}")
        for slot, tensor in inputs:
            phase = "batch" if slot in progress.given else "forward"
            if phase not in self._context.observe:
                continue
            site = (phase, stage, path, slot, str(call))
            regions = self._context.targets.layout.regions_of(tensor, path, slot)
            shape = self._shape(slot, tensor)
            axis, shard = self._batch_axis.split(shape, path=path, slot=slot, site=site, progress=progress)
            region = regions.value.batch_first(axis) if regions else None
            rows = batch_first(tensor, axis)
            self._sink.emit(rows, phase=phase, path=path, slot=slot, stage=stage, call=call, shard=shard, region=region)
        if not progress.evaluating:
            self._random_state("before")

    def _shape(self, slot: str, tensor: Tensor) -> tuple[int, ...]:
        """The shape of an input; the global shape if ranks hold parts of it."""
        regions = self._context.targets.layout.regions_of(tensor, "", slot)
        return regions.value.shape if regions else shape_of(tensor)

    def _random_state(self, stage: str) -> None:
        chunk, call = self._sink.progress.chunk, self._sink.progress.next_call("", f"rng {stage}")
        call = call if chunk is None else chunk.stage  # each rank has generators of its own
        for device, read in _generators():
            self._sink.emit(read(), phase="batch", path="rng", slot=device, stage=stage, call=call)


def _generators() -> list[tuple[str, Callable[[], Tensor]]]:
    """The global generators of torch. Reading their state draws nothing and waits for no device."""
    found: list[tuple[str, Callable[[], Tensor]]] = [("cpu", torch.get_rng_state)]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(("cuda", torch.cuda.get_rng_state))
    return found
