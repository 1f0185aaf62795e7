"""Observe what each module returns in the forward pass, and the gradients of it in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from traindiff.kernels.torch_arrays import shape_of
from traindiff.observation import BOUNDARY, RECOMPUTED, Merge
from traindiff.place import Place, Places
from traindiff.shards import Shard
from traindiff.site import path_in_whole
from traindiff.taps._torch_compat import from_compiled_code, inside_backward
from traindiff.taps.batch_axis import BatchAxis, batch_first
from traindiff.taps.chunk import Chunk
from traindiff.taps.compiled import tap_compiled_inspection, tap_compiled_module
from traindiff.taps.inspection import tap_inspection
from traindiff.taps.nested import tensors
from traindiff.taps.silent_modules import SilentModules, takes_hooks
from traindiff.taps.sink import Sink

PARTIAL = (
    "compiled code returned it together with other tensors, and what part of its gradient flows inside that code "
    "cannot be seen; it can where a function that calls the module is compiled, not the module itself"
)

LEAF = "compiled code returned a parameter or an input itself, whose gradient is seen as that of the parameter alone"


class ActivationTap:
    """Summarise activations and the gradients of them.

    Gradients come from tensor hooks, which insert nothing into the graph. (Full backward hooks of
    modules do: they change which nodes there are, and the order in which gradients accumulate.)

    Args:
        sink: Receives observations of phase `forward` and `backward`.
        batch_axis: Recognises the batch axis.
        forward: Whether to record activations.
        backward: Whether to record their gradients.
        evaluation: Whether forward passes of the root without gradients are recorded too.
        places: Where an activation that ranks hold parts of lies, and its gradient, by path and slot.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        batch_axis: BatchAxis,
        forward: bool,
        backward: bool,
        evaluation: bool,
        places: Callable[[Tensor, str, str], Places | None] = lambda tensor, path, slot: None,  # noqa: ARG005
    ) -> None:
        self._sink = sink
        self._batch_axis = batch_axis
        self._forward = forward
        self._backward = backward
        self._evaluation = evaluation
        self._places = places
        self._on_leaves: dict[tuple[str, str, int, int], RemovableHandle] = {}
        self._compiled: dict[tuple[str, str], list[_Gradient]] = {}
        self._silent = SilentModules({}, sink)

    def attach(self, modules: Mapping[str, nn.Module]) -> ExitStack:
        """Observe every module of a mapping from canonical paths. Close the result to remove the tap."""
        self._silent = SilentModules(modules, self._sink)
        with ExitStack() as undo:
            undo.callback(self._leave_leaves)
            for path, module in modules.items():
                if not takes_hooks(module):
                    continue
                site = path_in_whole(path)
                hook = self._sink.guarded("module_outputs", partial(self._module_output, site))
                if not site:
                    hook = self._sink.guarded("module_outputs", self._root_output)
                    received = self._sink.guarded("module_outputs", self._stage_input)
                    undo.callback(module.register_forward_pre_hook(received).remove)
                undo.callback(module.register_forward_hook(hook).remove)
                undo.enter_context(tap_compiled_module(module, _Compiled(self, self._sink, path)))
            return undo.pop_all()

    def attach_inspection(self) -> ExitStack:
        """Observe what `traindiff.inspect` is called with. Close the result to remove the tap."""
        with ExitStack() as undo:
            undo.enter_context(tap_inspection(self._sink.guarded("inspect", self.inspect)))
            undo.enter_context(tap_compiled_inspection(_CompiledInspection(self, self._sink)))
            return undo.pop_all()

    def inspect(self, name: str, tensor: Tensor) -> None:
        """Observe an intermediate tensor that no module returns."""
        self._observe(name, [("value", tensor)])

    def report_silence(self) -> None:
        """Record which modules returned nothing, where that may be because they were compiled."""
        self._silent.report()

    def _module_output(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        # Returning None tells torch to keep `output` as it is.
        self._observe(path, list(tensors(output, "output")))

    def _root_output(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        chunk = self._sink.progress.chunk
        if chunk is None or chunk.is_last:
            self._module_output("", module, args, output)
        else:
            self._boundary(chunk, tensors(output, "sent"))

    def _stage_input(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        chunk = self._sink.progress.chunk
        if chunk is not None and not chunk.is_first:
            self._boundary(chunk, tensors(args, "received"))

    def _boundary(self, chunk: Chunk, found: Iterable[tuple[str, Tensor]]) -> None:
        """Record what one stage of a pipeline hands to the next, on either side, and the gradient on its way back."""
        if self._stage() != "":
            return
        for slot, tensor in found:
            gradient = self._tensor(tensor, path=f"stage[{chunk.stage}]", slot=slot, stage=BOUNDARY, call=0)
            if self._backward and tensor.requires_grad:
                self._hook_gradient(tensor, gradient)

    def _observe(self, path: str, found: Sequence[tuple[str, Tensor]]) -> None:
        stage = self._stage()
        if stage is None:
            return
        self._silent.heard(path, compiled=False)
        call = self._sink.progress.next_call(path, stage)
        alone = sum(tensor.requires_grad for _, tensor in found) == 1
        for slot, tensor in found:
            gradient = self._tensor(tensor, path=path, slot=slot, stage=stage, call=call)
            if not (self._backward and tensor.requires_grad):
                continue
            if alone or not from_compiled_code(tensor):
                self._hook_gradient(tensor, gradient)
            else:
                self._sink.unobserved(PARTIAL, phase="backward", path=path, slot=slot)

    def _compiled_output(self, path: str, tensor: Tensor, slot: str) -> None:
        """An output in compiled code: one operator call per tensor, so calls are counted per tensor."""
        progress = self._sink.progress
        stage = self._stage()
        if stage is None:
            return
        self._silent.heard(path, compiled=True)
        call = progress.next_call(f"{path} {slot}", stage)
        gradient = self._tensor(tensor, path=path, slot=slot, stage=stage, call=call)
        waiting = self._compiled.setdefault((path, slot), [])
        if waiting and waiting[-1].step != progress.step:
            waiting.clear()  # nothing went back through the last step
        waiting.append(gradient)

    def _compiled_gradient(self, path: str, tensor: Tensor, slot: str) -> None:
        """A gradient in compiled code: of the latest output that has had none."""
        waiting = self._compiled.get((path, slot), [])
        fresh = [gradient for gradient in waiting if not gradient.times]
        for gradient in (fresh or waiting)[-1:]:
            gradient(tensor)

    def _compiled_leaf(self, path: str, slot: str) -> None:
        """An output in compiled code of which no gradient will come."""
        if self._backward and self._stage() is not None:
            self._sink.unobserved(LEAF, phase="backward", path=path, slot=slot)

    def _stage(self) -> str | None:
        """Stage of what a module returns now; None if it is not observed."""
        progress = self._sink.progress
        if not progress.observing or (progress.evaluating and not self._evaluation):
            return None
        return "evaluation" if progress.evaluating else RECOMPUTED if inside_backward() else ""

    def _tensor(self, tensor: Tensor, *, path: str, slot: str, stage: str, call: int) -> _Gradient:
        """Record an output; returns what will record its gradient."""
        progress = self._sink.progress
        site = ("forward", stage, path, slot, str(call))
        places = self._places(tensor, path, slot)
        shape = places.value.shape if places else shape_of(tensor)
        axis, shard = self._batch_axis.split(shape, path=path, slot=slot, site=site, progress=progress)
        batch = progress.current_batch
        samples = batch.size if batch else 1
        scalar = tensor.dim() == 0 and batch is not None
        if self._forward:
            # A number per micro-batch (a loss inside the model) is a term of a mean over them.
            self._sink.emit(
                batch_first(tensor, axis), phase="forward", path=path, slot=slot, stage=stage, call=call,
                shard=shard, merge="mean" if scalar else "shard", weight=samples if scalar else 1,
                place=places.value.batch_first(axis) if places else None,
            )  # fmt: skip
        # Of a tensor without a batch axis, every micro-batch has a share of the gradient.
        shared = batch is not None and not shard.batched
        return _Gradient(
            sink=self._sink, path=path, slot=slot, call=call, axis=axis, shard=shard,
            step=progress.step, micro_step=progress.micro_step, merge="sum" if shared else "shard",
            stage=BOUNDARY if stage == BOUNDARY else "", place=places.gradient.batch_first(axis) if places else None,
        )  # fmt: skip

    def _hook_gradient(self, tensor: Tensor, gradient: _Gradient) -> None:
        handle = tensor.register_hook(self._sink.guarded("module_outputs", gradient))
        if tensor.is_leaf:
            # A pipeline runs several micro-batches forward before it runs the first one back.
            round_ = 0 if self._sink.progress.chunk is None else gradient.micro_step
            self._hooked_leaf((gradient.path, gradient.slot, gradient.call, round_), handle)

    def _hooked_leaf(self, site: tuple[str, str, int, int], handle: RemovableHandle) -> None:
        """Note a hook on a tensor that may outlive the step, and its hook with it: a parameter, an input.

        Other tensors take their hooks along when the graph is freed.
        """
        if before := self._on_leaves.pop(site, None):
            before.remove()
        self._on_leaves[site] = handle

    def _leave_leaves(self) -> None:
        for handle in self._on_leaves.values():
            handle.remove()
        self._on_leaves.clear()


class _Compiled:
    """Observes one module in compiled code."""

    def __init__(self, tap: ActivationTap, sink: Sink, path: str) -> None:
        self.output = sink.guarded("module_outputs", partial(tap._compiled_output, path))
        self.gradient = sink.guarded("module_outputs", partial(tap._compiled_gradient, path))
        self.no_gradient = sink.guarded("module_outputs", partial(tap._compiled_leaf, path))


class _CompiledInspection:
    """Observes what compiled code inspects."""

    def __init__(self, tap: ActivationTap, sink: Sink) -> None:
        self._output = sink.guarded("inspect", tap._compiled_output)
        self._gradient = sink.guarded("inspect", tap._compiled_gradient)
        self._leaf = sink.guarded("inspect", tap._compiled_leaf)

    def output(self, tensor: Tensor, name: str) -> None:
        """See `traindiff.taps.compiled.ModuleObserver`."""
        self._output(name, tensor, "value")

    def gradient(self, gradient: Tensor, name: str) -> None:
        """See `traindiff.taps.compiled.ModuleObserver`."""
        self._gradient(name, gradient, "value")

    def no_gradient(self, name: str) -> None:
        """See `traindiff.taps.compiled.ModuleObserver`."""
        self._leaf(name, "value")


@dataclass(slots=True, kw_only=True)
class _Gradient:
    """The hook on one activation: everything about it but the gradient itself."""

    sink: Sink
    path: str
    slot: str
    call: int
    axis: int
    shard: Shard
    step: int
    micro_step: int
    merge: Merge
    place: Place | None
    stage: str = ""
    times: int = 0

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return  # autograd passes the node, for another of its outputs
        progress = self.sink.progress
        if progress.chunk is not None and (progress.step, progress.micro_step) != (self.step, self.micro_step):
            return  # on a leaf, which another micro-batch has, too
        if progress.chunk is not None and progress.chunk.again and self.times:
            return
        # A second backward through the same graph brings another term, not a new gradient.
        stage = f"again[{self.times}]" if self.times else self.stage
        self.times += 1
        if self.sink.progress.observing:
            self.sink.emit(
                batch_first(gradient, self.axis), phase="backward", path=self.path, slot=self.slot,
                stage=stage, call=self.call, micro_step=self.micro_step, shard=self.shard, merge=self.merge,
                place=self.place,
            )  # fmt: skip
