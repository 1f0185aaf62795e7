"""Observe activations, and the gradients that come back to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.observation import BOUNDARY, RECOMPUTED, Merge
from traindiff.core.shards import Region, Shard
from traindiff.core.torch_compat.execution import from_compiled_code, inside_backward
from traindiff.observe.common.batch_axis import batch_first
from traindiff.observe.common.progress import Chunk
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.context import TapContext

PARTIAL = (
    "compiled code returned it together with other tensors, and what part of its gradient flows inside that code "
    "cannot be seen; it can where a function that calls the module is compiled, not the module itself"
)

LEAF = "compiled code returned a parameter or an input itself, whose gradient is seen as that of the parameter alone"


class Activations:
    """Summarizes activations and their gradients (phases `forward` and `backward`).

    Gradients come from tensor hooks, which insert nothing into the graph. Full backward hooks of modules would: they
    add nodes, and change the order in which gradients accumulate.

    Args:
        context: The training.
        tap: Name of the tap that observes them.
    """

    def __init__(self, context: TapContext, *, tap: str) -> None:
        self._sink = context.sink
        self._batch_axis = context.batch_axis
        self._forward = "forward" in context.observe
        self._backward = "backward" in context.observe
        self._evaluation = context.settings.evaluation
        self._regions = context.targets.layout.regions_of
        self._guarded = partial(context.sink.guarded, tap)
        self._on_leaves: dict[tuple[str, str, int, int], RemovableHandle] = {}
        self._compiled: dict[tuple[str, str], list[_Gradient]] = {}

    def observe(self, path: str, found: Sequence[tuple[str, Tensor]]) -> bool:
        """Record the tensors that a module returned, by slot; returns True if this pass is observed."""
        stage = self._stage(beside_roots=self._is_beside_roots())
        if stage is None:
            return False
        call = self._sink.progress.next_call(path, stage)
        alone = len(found) == 1 or sum(tensor.requires_grad for _, tensor in found) == 1
        for slot, tensor in found:
            gradient = self._tensor(tensor, path=path, slot=slot, stage=stage, call=call)
            if not (self._backward and tensor.requires_grad):
                continue
            if alone or not from_compiled_code(tensor):
                self._hook_gradient(tensor, gradient)
            else:
                self._sink.unobserved(PARTIAL, phase="backward", path=path, slot=slot)
        return True

    def unobserved(self, path: str, slot: str, reason: str) -> None:
        """Record that a value is no tensor, where an output would be recorded."""
        if self._forward and self._stage() == "":
            self._sink.unobserved(reason, phase="forward", path=path, slot=slot)

    def boundary(self, chunk: Chunk, found: Iterable[tuple[str, Tensor]]) -> None:
        """Record the tensors that pipeline stages send or receive, and the gradients that go back."""
        if self._stage() != "":
            return
        for slot, tensor in found:
            gradient = self._tensor(tensor, path=f"stage[{chunk.stage}]", slot=slot, stage=BOUNDARY, call=0)
            if self._backward and tensor.requires_grad:
                self._hook_gradient(tensor, gradient)

    def compiled_output(self, path: str, tensor: Tensor, slot: str) -> bool:
        """Record an output in compiled code, as `observe` does; calls are counted per tensor, each has its operator."""
        progress = self._sink.progress
        stage = self._stage()
        if stage is None:
            return False
        call = progress.next_call(f"{path} {slot}", stage)
        gradient = self._tensor(tensor, path=path, slot=slot, stage=stage, call=call)
        waiting = self._compiled.setdefault((path, slot), [])
        if waiting and waiting[-1].step != progress.step:
            waiting.clear()  # no gradient came in the last step
        waiting.append(gradient)
        return True

    def compiled_gradient(self, path: str, tensor: Tensor, slot: str) -> None:
        """Record a gradient in compiled code: that of the latest output without one."""
        waiting = self._compiled.get((path, slot), [])
        fresh = [gradient for gradient in waiting if not gradient.times]
        for gradient in (fresh or waiting)[-1:]:
            gradient(tensor)

    def compiled_leaf(self, path: str, slot: str) -> None:
        """Record that an output in compiled code will have no gradient."""
        if self._backward and self._stage() is not None:
            self._sink.unobserved(LEAF, phase="backward", path=path, slot=slot)

    def let_go(self) -> None:
        """Remove the hooks on tensors that may live longer than the graph."""
        for handle in self._on_leaves.values():
            handle.remove()
        self._on_leaves.clear()

    def _is_beside_roots(self) -> bool:
        """True if the training loop is calling a non-root module directly, e.g. its loss, or a part of the model."""
        return not self._sink.progress.in_forward and not inside_backward()

    def _stage(self, *, beside_roots: bool = False) -> str | None:
        """The stage of an output that a module returns now; None if it is not observed."""
        progress = self._sink.progress
        evaluating = progress.evaluating or (beside_roots and not torch.is_grad_enabled())
        if not progress.observing or (evaluating and not self._evaluation):
            return None
        return "evaluation" if evaluating else RECOMPUTED if inside_backward() else ""

    def _tensor(self, tensor: Tensor, *, path: str, slot: str, stage: str, call: int) -> _Gradient:
        """Record an output; returns the hook that records its gradient."""
        progress = self._sink.progress
        site = ("forward", stage, path, slot, str(call))
        regions = self._regions(tensor, path, slot)
        shape = regions.value.shape if regions else shape_of(tensor)
        axis, shard = self._batch_axis.split(shape, path=path, slot=slot, site=site, progress=progress)
        batch = progress.current_batch
        samples = batch.size if batch else 1
        scalar = tensor.dim() == 0 and batch is not None
        if self._forward:
            # A number per micro-batch (a loss inside the model) is a term of a mean over them.
            self._sink.emit(
                batch_first(tensor, axis), phase="forward", path=path, slot=slot, stage=stage, call=call,
                shard=shard, merge="mean" if scalar else "shard", weight=samples if scalar else 1,
                region=regions.value.batch_first(axis) if regions else None,
            )  # fmt: skip
        # Each micro-batch contributes a share to the gradient of a tensor without a batch axis.
        shared = batch is not None and not shard.batched
        return _Gradient(
            sink=self._sink, path=path, slot=slot, call=call, axis=axis, shard=shard,
            step=progress.step, micro_step=progress.micro_step, merge="sum" if shared else "shard",
            stage=BOUNDARY if stage == BOUNDARY else "", region=regions.gradient.batch_first(axis) if regions else None,
        )  # fmt: skip

    def _hook_gradient(self, tensor: Tensor, gradient: _Gradient) -> None:
        handle = tensor.register_hook(self._guarded(gradient))
        if tensor.is_leaf:
            # A pipeline runs several micro-batches forward before it runs the first one back.
            round_ = 0 if self._sink.progress.chunk is None else gradient.micro_step
            self._hooked_leaf((gradient.path, gradient.slot, gradient.call, round_), handle)

    def _hooked_leaf(self, site: tuple[str, str, int, int], handle: RemovableHandle) -> None:
        """Note a hook on a parameter or an input, which may outlive the step; other tensors go with the graph."""
        if before := self._on_leaves.pop(site, None):
            before.remove()
        self._on_leaves[site] = handle


@dataclass(slots=True, kw_only=True)
class _Gradient:
    """The hook on one activation, which records its gradient."""

    sink: Sink
    path: str
    slot: str
    call: int
    axis: int
    shard: Shard
    step: int
    micro_step: int
    merge: Merge
    region: Region | None
    stage: str = ""
    times: int = 0

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return  # autograd passes the node, for another of its outputs
        progress = self.sink.progress
        if progress.chunk is not None and (progress.step, progress.micro_step) != (self.step, self.micro_step):
            return  # the hook is on a leaf, which another micro-batch has, too
        if progress.chunk is not None and progress.chunk.again and self.times:
            return
        # A second backward through the same graph brings another term, not a new gradient.
        stage = f"again[{self.times}]" if self.times else self.stage
        self.times += 1
        if self.sink.progress.observing:
            self.sink.emit(
                batch_first(gradient, self.axis), phase="backward", path=self.path, slot=self.slot,
                stage=stage, call=self.call, micro_step=self.micro_step, shard=self.shard, merge=self.merge,
                region=self.region,
            )  # fmt: skip
