"""Observe activations, and the gradients that come back to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.observation import BOUNDARY, RECOMPUTED, Merge
from traindiff.core.shards import Region, Shard
from traindiff.core.torch_compat.autograd import inside_backward, inside_own_backward
from traindiff.core.torch_compat.compiling import from_compiled_code
from traindiff.observe.common.batch_axis import batch_first
from traindiff.observe.common.progress import Batch, Chunk
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.context import TapContext

PARTIAL = (
    "compiled code returned it together with other tensors, and what part of its gradient flows inside that code "
    "cannot be seen; it can where a function that calls the module is compiled, not the module itself"
)

LEAF = "compiled code returned a parameter or an input itself, whose gradient is seen as that of the parameter alone"

OWN = "a function of autograd computes it in its own backward pass, as solvers and reversible layers do"

_MOST_KNOWN = 1 << 14
"""Outputs of which something is known, before all of it is forgotten: a bound of memory."""

_MOST_LOOKS = 3
"""How often it is found out how an output looks, because it has changed; after that it goes the slow way."""


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
        self._progress = context.sink.progress
        self._batch_axis = context.batch_axis
        self._forward = "forward" in context.observe
        self._backward = "backward" in context.observe
        self._evaluation = context.settings.evaluation
        self._regions = context.targets.layout.regions_of
        self._guarded = partial(context.sink.guarded, tap)
        self._on_leaves: dict[tuple[str, str, int, int], RemovableHandle] = {}
        self._compiled: dict[tuple[str, str], list[_Gradient]] = {}
        self._outputs: dict[tuple[str, str, str, int, int], _Output] = {}

    def observe(self, path: str, found: Sequence[tuple[str, Tensor]]) -> bool:
        """Record the tensors that a module returned, by slot; returns True if this pass is observed."""
        stage = self._stage(maybe_beside_roots=True)
        if stage is None:
            return False
        call = self._progress.next_call(path, stage)
        alone = len(found) == 1 or sum(tensor.requires_grad for _, tensor in found) == 1
        for slot, tensor in found:
            output = self._output(tensor, path, slot, stage, call)
            if not (self._backward and tensor.requires_grad):
                continue
            gradient = _Gradient(self._sink, output)
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
            output = self._output(tensor, f"stage[{chunk.stage}]", slot, BOUNDARY, 0)
            if self._backward and tensor.requires_grad:
                self._hook_gradient(tensor, _Gradient(self._sink, output))

    def compiled_output(self, path: str, tensor: Tensor, slot: str) -> bool:
        """Record an output in compiled code, as `observe` does; calls are counted per tensor, each has its operator."""
        progress = self._progress
        stage = self._stage()
        if stage is None:
            return False
        call = progress.next_call(f"{path} {slot}", stage)
        gradient = _Gradient(self._sink, self._output(tensor, path, slot, stage, call))
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

    def forget(self) -> None:
        """Forget what is known of outputs: a module may take the place of another one."""
        self._outputs.clear()

    def let_go(self) -> None:
        """Remove the hooks on tensors that may live longer than the graph."""
        for handle in self._on_leaves.values():
            handle.remove()
        self._on_leaves.clear()

    def _stage(self, *, maybe_beside_roots: bool = False) -> str | None:
        """The stage of an output that a module returns now; None if it is not observed.

        Args:
            maybe_beside_roots: The training loop may be calling the module itself, e.g. its loss, or a part of the
                model: outside the forward passes of the roots.
        """
        progress = self._progress
        if not progress.observing:
            return None
        inside = inside_backward()
        beside_roots = maybe_beside_roots and not progress.in_forward and not inside
        if progress.evaluating or (beside_roots and not torch.is_grad_enabled()):
            return "evaluation" if self._evaluation else None
        return RECOMPUTED if inside else ""

    def _output(self, tensor: Tensor, path: str, slot: str, stage: str, call: int) -> _Output:
        """Record an output; returns what is known of it."""
        known = self._outputs.get((path, slot, stage, call, self._progress.micro_step))
        if known is not None and self._again(known, tensor):
            return known
        return self._look(tensor, path=path, slot=slot, stage=stage, call=call)

    def _again(self, known: _Output, tensor: Tensor) -> bool:
        """Record an output like one of which all is known; False, and nothing is recorded, if it is not like it."""
        progress = self._progress
        if known.forward is None or known.batch is not progress.current_batch or progress.is_in_pipeline:
            return False
        if known.rows and progress.counted(known.site) != known.counted:
            return False
        if not self._sink.again(known.forward, tensor, micro_step=progress.micro_step):
            return False
        if known.rows:
            progress.count(known.site, known.rows)
        return True

    def _look(self, tensor: Tensor, *, path: str, slot: str, stage: str, call: int) -> _Output:
        """Record an output of which not all is known; returns what is known of it now."""
        progress = self._progress
        site = ("forward", stage, path, slot, str(call))
        counted = progress.counted(site)
        regions = self._regions(tensor, path, slot)
        shape = regions.value.shape if regions else shape_of(tensor)
        axis, shard = self._batch_axis.split(shape, path=path, slot=slot, site=site, progress=progress)
        batch = progress.current_batch
        samples = batch.size if batch else 1
        scalar = tensor.dim() == 0 and batch is not None
        row = None
        if self._forward and stage == RECOMPUTED and inside_own_backward():
            self._sink.unobserved(OWN, phase="forward", path=path, slot=slot, stage=stage)
        elif self._forward:
            # A number per micro-batch (a loss inside the model) is a term of a mean over them.
            row = self._sink.emit(
                batch_first(tensor, axis), phase="forward", path=path, slot=slot, stage=stage, call=call,
                shard=shard, merge="mean" if scalar else "shard", weight=samples if scalar else 1,
                region=regions.value.batch_first(axis) if regions else None,
            )  # fmt: skip
        # Each micro-batch contributes a share to the gradient of a tensor without a batch axis.
        shared = batch is not None and not shard.batched
        found = _Output(
            path=path, slot=slot, call=call, axis=axis, shard=shard, merge="sum" if shared else "shard",
            stage=BOUNDARY if stage == BOUNDARY else "", region=regions.gradient.batch_first(axis) if regions else None,
            site=site, batch=batch, counted=counted, rows=progress.counted(site) - counted,
        )  # fmt: skip
        if row is None or axis or progress.is_in_pipeline:
            return found
        place = (path, slot, stage, call, progress.micro_step)
        before = self._outputs.get(place)
        if before is None or not before.is_like(found):
            if len(self._outputs) >= _MOST_KNOWN:
                self._outputs.clear()
            self._outputs[place] = found
            return found
        before.batch = batch  # equal, and maybe another object
        if before.times_forward < _MOST_LOOKS:
            before.times_forward += 1
            before.forward = self._sink.known(row, tensor)
        return before

    def _hook_gradient(self, tensor: Tensor, gradient: _Gradient) -> None:
        handle = tensor.register_hook(self._guarded(gradient, quick=gradient.quick))
        if tensor.is_leaf:
            self._hooked_leaf(gradient.site, handle)

    def _hooked_leaf(self, site: tuple[str, str, int, int], handle: RemovableHandle) -> None:
        """Note a hook on a parameter or an input, which may outlive the step; other tensors go with the graph."""
        if before := self._on_leaves.pop(site, None):
            before.remove()
        self._on_leaves[site] = handle


@dataclass(slots=True, kw_only=True, eq=False)
class _Output:
    """What is known of one output of a module, at one call in a micro-step.

    Attributes:
        path, slot, call, axis, shard, merge, region, stage: Of its gradient.
        site: Its key in the count of rows; `rows` of it were counted after `counted` others.
        batch: The batch that was worked on.
        forward: What is known of the output itself, from the second time on that it is the same.
        backward: What is known of its gradient.
        times_forward: How often `forward` was found out, because it had changed; `times_backward`, the same.
    """

    path: str
    slot: str
    call: int
    axis: int
    shard: Shard
    merge: Merge
    region: Region | None
    stage: str
    site: tuple[str, ...]
    batch: Batch | None
    counted: int
    rows: int
    forward: Any = None
    backward: Any = None
    times_forward: int = 0
    times_backward: int = 0

    def is_like(self, other: _Output) -> bool:
        """True if the other output has the same place in the same batch."""
        return (self.batch, self.counted, self.rows, self.shard) == (
            other.batch, other.counted, other.rows, other.shard
        )  # fmt: skip


class _Gradient:
    """The hook on one activation, which records its gradient.

    Args:
        sink: Receives it.
        output: What is known of the activation, which was made in this micro-step.

    Attributes:
        output: See above.
        step: The step in which it was made.
        times: The number of gradients so far.
    """

    __slots__ = ("_micro_step", "_sink", "output", "step", "times")

    def __init__(self, sink: Sink, output: _Output) -> None:
        self._sink = sink
        self.output = output
        progress = sink.progress
        self.step = progress.number_of(progress.optimizer)
        self._micro_step = progress.micro_step
        self.times = 0

    def quick(self, gradient: Tensor | None, *, guarded: bool = False) -> bool:
        """Record the gradient if all is known of it; False, and nothing is recorded, if not."""
        known, progress = self.output.backward, self._sink.progress
        if known is None or gradient is None or self.times or progress.chunk is not None or not progress.observing:
            return False
        if not self._sink.again(known, gradient, micro_step=self._micro_step, guarded=guarded):
            return False
        self.times = 1
        return True

    def __call__(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return  # autograd passes the node, for another of its outputs
        if self.quick(gradient, guarded=True):
            return  # not without a guard: on a GPU, or in a mode
        sink, output, progress = self._sink, self.output, self._sink.progress
        if progress.chunk is not None and (progress.step, progress.micro_step) != (self.step, self._micro_step):
            return  # the hook is on a leaf, which another micro-batch has, too
        if progress.chunk is not None and progress.chunk.again and self.times:
            return
        times, self.times = self.times, self.times + 1
        if not progress.observing:
            return
        # A second backward through the same graph brings another term, not a new gradient.
        row = sink.emit(
            batch_first(gradient, output.axis), phase="backward", path=output.path, slot=output.slot,
            stage=f"again[{times}]" if times else output.stage, call=output.call, micro_step=self._micro_step,
            shard=output.shard, merge=output.merge, region=output.region,
        )  # fmt: skip
        if output.forward is not None and not times and output.times_backward < _MOST_LOOKS:
            output.times_backward += 1
            output.backward = sink.known(row, gradient)

    @property
    def site(self) -> tuple[str, str, int, int]:
        """What tells it from the other hooks that a leaf may have."""
        # A pipeline runs several micro-batches forward before it runs the first one back.
        round_ = 0 if self._sink.progress.chunk is None else self._micro_step
        return self.output.path, self.output.slot, self.output.call, round_
