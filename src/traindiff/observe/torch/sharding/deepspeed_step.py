"""Observe the steps of a DeepSpeed optimizer, each of which calls its inner torch optimizer several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from traindiff.core.observation import MASTER, SKIPPED
from traindiff.core.shards import Piece
from traindiff.observe.common.listeners import INHERITED, put_back
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.gradient_stages import emit_clipping
from traindiff.observe.torch.hooks.loss_scale import emit_loss_scale
from traindiff.observe.torch.hooks.optimizer_replay import CAPACITY_BYTES, OptimizerReplayTap
from traindiff.observe.torch.hooks.optimizer_step import OptimizerTap
from traindiff.observe.torch.hooks.step_hooks import hook_before_step
from traindiff.observe.torch.sharding.deepspeed_optimizer import (
    EngineOptimizer,
    HeldTensor,
    decouples_weight_decay,
    loss_scale_of,
)


def around(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] = lambda *_, **__: None,
    after: Callable[[Any], None] = lambda _: None,
) -> ExitStack:
    """Call functions before and after every call of a method of one object, by replacing the method.

    Args:
        owner: The object.
        name: Name of the method.
        before: Called with the arguments of the call.
        after: Called with the result; not called if the method raises.

    Returns:
        Close it to put the method back.
    """
    original = getattr(owner, name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(result)
        return result

    undo = ExitStack()
    undo.callback(put_back, owner, name, vars(owner).get(name, INHERITED), method)
    setattr(owner, name, method)
    return undo


LEFT_OUT = "the step was left out, and DeepSpeed had dropped its gradients before that"


class EngineOptimizerTap(OptimizerTap):
    """Summarize the values that a DeepSpeed optimizer reads and writes on this rank. No collective is called.

    Gradients are those that the inner optimizer is given: reduced, unscaled and clipped. State is that of the parts
    which this rank holds. Parameters are those that the model computes with after the step, when the ranks have
    exchanged their updates.

    Args:
        optimizer: The optimizer. The other arguments are those of `OptimizerTap`.
    """

    HOLDS_GROUPS = False

    def __init__(
        self, optimizer: EngineOptimizer, *, name: str, context: TapContext, on_end: Callable[[str], None]
    ) -> None:
        super().__init__(optimizer.inner[0], name=name, context=context, on_end=on_end)
        self._engine = optimizer
        # FusedAdam (in 0.19.6) counts the steps of a group only in the state of its last parameter.
        self._counts_by_group = type(self.optimizer).__name__ == "FusedAdam"
        self._stepped = False
        self._unscaled: set[int] = set()  # ids of tensors whose gradients were recorded before they were clipped

    def attach(self) -> ExitStack:
        """Follow the optimizer's steps. Close the result to remove the tap."""
        guarded = partial(self._sink.guarded, "optimizer_step")
        with ExitStack() as undo:
            for inner in self._engine.inner:
                undo.callback(hook_before_step(inner, guarded(self._before_part)).remove)
            outer, after = self._engine.outer, guarded(self._after)
            if hasattr(outer, "scale_if_loss"):
                undo.enter_context(around(outer, "scale_if_loss", after=guarded(self._scaled)))
            if hasattr(outer, "unscale_and_clip_grads"):
                undo.enter_context(around(outer, "unscale_and_clip_grads", before=guarded(self._before_unscaling)))
            undo.enter_context(
                around(outer, "step", before=guarded(self.before_step), after=partial(self._after_call, after))
            )
            return undo.pop_all()

    def replays(self) -> list[OptimizerReplayTap]:
        """Taps that check the inner optimizers: one per tensor, as each tensor is stepped by a call of its own."""
        capacity_bytes = CAPACITY_BYTES // max(1, len(self._engine.held))
        return [
            OptimizerReplayTap(
                inner, name=self.name, held=partial(self._present, inner, held), selects=self._selects,
                sink=self._sink, state_of=self.state_of, capacity_bytes=capacity_bytes,
            )
            for inner in self._engine.inner
            for held in self._engine.held
        ]  # fmt: skip

    def _present(self, inner: Optimizer, held: HeldTensor) -> Iterator[tuple[int, Tensor, Sequence[Piece]]]:
        """The tensor with its group and pieces, if the next call of this inner optimizer steps it."""
        for number, group in enumerate(inner.param_groups):
            if any(one is held.tensor for one in group["params"]):
                yield number, held.tensor, held.pieces

    def groups(self) -> list[list[str]]:
        """Canonical paths of the parameters in each group, with those of which this rank holds nothing."""
        return [list(group) for group in self._engine.groups]

    def before_step(self, *_: Any, **__: Any) -> None:
        """Record hyper-parameters; gradients do not exist yet."""
        self._stepped = False
        self._unscaled.clear()
        if self._sink.progress.observing and "optimizer" in self._observe:
            self._hyper_parameters()

    def after_step(self, *_: Any) -> None:
        """Record state, the model's parameters, and the master weights."""
        if not self._sink.progress.observing:
            return
        with self._sink.together():
            if "optimizer" in self._observe:
                for tensor, pieces in self.selected():
                    self._state(tensor, pieces)
            if "param" in self._observe:
                self._parameters()

    def _scaled(self, loss: Any) -> None:
        """Record the scale by which the engine has just multiplied a loss."""
        scale = loss_scale_of(self._engine.outer)
        if scale != 1.0 and isinstance(loss, Tensor):
            emit_loss_scale(self._sink, scale)

    def _before_unscaling(self, *_: Any, **__: Any) -> None:
        """Record gradients before the engine unscales and clips them."""
        changes = self._engine.clipping > 0.0 or loss_scale_of(self._engine.outer) != 1.0
        if not changes or not self._sink.progress.observing:
            return
        self._on_gradients(self, [*self.selected()], self._sink.progress.loss_scaled)
        if "grad.stages" not in self._observe:
            return
        with self._sink.together():
            for tensor, pieces in self.selected():
                if tensor.grad is not None and id(tensor) not in self._unscaled:
                    self._unscaled.add(id(tensor))
                    self._gradient(tensor, pieces, stage="reduced", scaled=None)

    def _before_part(self, inner: Optimizer, *_: Any) -> None:
        """Record the gradients that a call of an inner optimizer is given."""
        first, self._stepped = not self._stepped, True
        if not self._sink.progress.observing or "grad" not in self._observe:
            return
        if first and self._engine.clipping > 0.0:
            norm, limit = self._engine.outer._global_grad_norm, self._engine.clipping
            emit_clipping(self._sink, norm=norm, limit=limit, optimizer=self.name)
        ids = {id(one) for group in inner.param_groups for one in group["params"]}
        present = [(tensor, pieces) for tensor, pieces in self.selected() if id(tensor) in ids]
        self._on_gradients(self, present, False)  # noqa: FBT003  an event takes no names
        with self._sink.together():
            for tensor, pieces in present:
                self._gradient(tensor, pieces, stage="", scaled=None)

    def _after_call(self, after: Callable[[], None], _: Any) -> None:
        if self._stepped or self._counts_skipped:
            after()
            self._end_step()

    def _after(self) -> None:
        if self._stepped:
            self.after_step()
        else:
            self._skip()

    def _skip(self) -> None:
        """Record a step that was skipped because of infinite gradients."""
        if not self._sink.progress.observing:
            return
        if "optimizer" in self._observe:
            self._numbers(1, path=self.name, slot=SKIPPED)
        if "grad" in self._observe:
            for _, pieces in self.selected():
                for piece in pieces:
                    self._sink.unobserved(LEFT_OUT, phase="grad", path=piece.path, slot="grad", optimizer=self.name)
        self.after_step()

    def held(self) -> Iterator[tuple[int, Tensor, Sequence[Piece]]]:
        """Each tensor that an inner optimizer steps on, with the number of its group and its pieces."""
        yield from self._engine.held

    def state_of(self, parameter: Tensor) -> Mapping[str, Any]:
        """The inner optimizer's state of a parameter, with the count of steps that FusedAdam keeps elsewhere."""
        found: list[Mapping[str, Any]] = [one.state[parameter] for one in self._engine.inner if parameter in one.state]
        if not found or not self._counts_by_group:
            return found[0] if found else {}
        groups = [held.group for held in self._engine.held if held.tensor is parameter]
        same = (held.tensor for held in self._engine.held if held.group in groups)
        counts = [self.optimizer.state[one].get("step", 0) for one in same if one in self.optimizer.state]
        return {**found[0], "step": max(counts)}

    def _parameters(self) -> None:
        parameters = {path: one for group in self._engine.groups for path, one in group.items()}
        for path, parameter in parameters.items():
            if self._selects(path):
                self._sink.emit(parameter, phase="param", path=path, slot="value", optimizer=self.name)
        for tensor, pieces in self.selected():
            apart = [piece for piece in pieces if parameters[piece.path].dtype != tensor.dtype]
            self._emit_pieces(tensor, apart, phase="param", slot=MASTER)

    def _hyper_parameters(self) -> None:
        super()._hyper_parameters()
        decoupled = decouples_weight_decay(self.optimizer)
        for number, group in enumerate(self.optimizer.param_groups):
            path = f"{self.name}.groups[{number}]"
            self._numbers(self._engine.clipping, path=path, slot="gradient_clipping")
            if decoupled is not None and "decoupled_weight_decay" not in group:
                self._numbers(int(decoupled), path=path, slot="decoupled_weight_decay")
