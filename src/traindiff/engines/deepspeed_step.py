"""Observe the steps of a DeepSpeed optimizer: each is several calls of the torch optimizer inside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from traindiff.engines.deepspeed_optimizer import EngineOptimizer
from traindiff.shard import Piece
from traindiff.taps.optimizer_step import SKIPPED, OptimizerTap
from traindiff.taps.sink import Sink

MASTER = "master"
"""Slot of the weights that the optimizer steps on, where the model computes with another dtype."""

LEFT_OUT = "the step was left out, and DeepSpeed had dropped its gradients before that"


class EngineOptimizerTap(OptimizerTap):
    """Summarise what one of DeepSpeed's optimizers reads and writes, on this rank. No collective is called.

    Gradients are what the optimizer inside is given: reduced, unscaled and clipped. State is that of the parts which
    this rank holds. Parameters are those that the model computes with, as the end of the step leaves them: after
    the ranks have exchanged what they updated.

    Args:
        optimizer: The optimizer.
        name: What its steps and settings are filed under.
        selects: Whether the parameter with this path is observed.
        observe: Phases to record, of `grad`, `optimizer` and `param`.
        sink: Receives the observations.
        on_end: Called with `name` when a step has ended.
    """

    def __init__(
        self,
        optimizer: EngineOptimizer,
        *,
        name: str,
        selects: Callable[[str], bool],
        observe: Iterable[str],
        sink: Sink,
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(
            optimizer.inner[0], name=name, pieces_of=lambda *_: None, selects=selects, observe=observe, sink=sink,
            on_end=on_end,
        )  # fmt: skip
        self._engine = optimizer
        self._stepped = False

    def attach(self) -> ExitStack:
        """Follow the optimizer's steps. Close the result to remove the tap."""
        guarded = partial(self._sink.guarded, "optimizer_step")
        with ExitStack() as undo:
            for inner in self._engine.inner:
                undo.callback(inner.register_step_pre_hook(guarded(self._before_part)).remove)
            begin, end = guarded(self.before_step), guarded(self._after)
            undo.enter_context(_around_step(self._engine.outer, begin, [end, self._end_step]))
            return undo.pop_all()

    def groups(self) -> list[list[str]]:
        """Canonical paths of the parameters in each group, also of those of which this rank holds nothing."""
        return [list(group) for group in self._engine.groups]

    def before_step(self, *_: Any) -> None:
        """Record hyper-parameters; gradients are not there yet."""
        self._stepped = False
        if self._sink.progress.observing and "optimizer" in self._observe:
            self._hyper_parameters()

    def after_step(self, *_: Any) -> None:
        """Record state, what the model computes with, and what the optimizer steps on."""
        if not self._sink.progress.observing:
            return
        with self._sink.together():
            if "optimizer" in self._observe:
                for tensor, pieces in self._selected():
                    self._state(tensor, pieces)
            if "param" in self._observe:
                self._parameters()

    def _before_part(self, inner: Optimizer, *_: Any) -> None:
        """Record the gradients that a call of the optimizer inside is given."""
        self._stepped = True
        if not self._sink.progress.observing or "grad" not in self._observe:
            return
        present = {id(one) for group in inner.param_groups for one in group["params"]}
        with self._sink.together():
            for tensor, pieces in self._selected():
                if id(tensor) in present:
                    self._gradient(tensor, pieces)

    def _after(self) -> None:
        if self._stepped:
            self.after_step()
        else:
            self._skip()

    def _skip(self) -> None:
        """Record a step that was left out because of infinite gradients."""
        if not self._sink.progress.observing:
            return
        if "optimizer" in self._observe:
            self._numbers(1, path=self.name, slot=SKIPPED)
        if "grad" in self._observe:
            for _, pieces in self._selected():
                for piece in pieces:
                    self._sink.unobserved(LEFT_OUT, phase="grad", path=piece.path, slot="grad", optimizer=self.name)
        self.after_step()

    def held(self) -> Iterator[tuple[int, Tensor, Sequence[Piece]]]:
        """Number of the group, what the optimizer inside steps on, and which of the model's parameters that holds."""
        for held in self._engine.held:
            yield held.group, held.tensor, held.pieces

    def _parameters(self) -> None:
        parameters = {path: one for group in self._engine.groups for path, one in group.items()}
        for path, parameter in parameters.items():
            if self._selects(path):
                self._emit(parameter, phase="param", path=path, slot="value")
        for tensor, pieces in self._selected():
            apart = [piece for piece in pieces if parameters[piece.path].dtype != tensor.dtype]
            self._emit_pieces(tensor, apart, phase="param", slot=MASTER)

    def _hyper_parameters(self) -> None:
        super()._hyper_parameters()
        decoupled = getattr(self.optimizer, "adam_w_mode", None)  # of DeepSpeed's own Adam, for all groups
        for number, group in enumerate(self.optimizer.param_groups):
            path = f"{self.name}.groups[{number}]"
            self._numbers(self._engine.clipping, path=path, slot="gradient_clipping")
            if decoupled is not None and "decoupled_weight_decay" not in group:
                self._numbers(int(decoupled), path=path, slot="decoupled_weight_decay")


def _around_step(outer: Any, begin: Callable[[], None], end: Sequence[Callable[[], None]]) -> ExitStack:
    """Call functions before and after every `outer.step`; `end` not where it raised. Close the result to stop it.

    There is no hook for it, so the method of this one object is replaced, and put back.
    """
    original = outer.step
    replaced = outer.__dict__.get("step")

    @wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        begin()
        result = original(*args, **kwargs)
        for function in end:
            function()
        return result

    def put_back() -> None:
        if outer.__dict__.get("step") is not step:
            return  # somebody else has replaced it since
        if replaced is None:
            del outer.step
        else:
            outer.step = replaced

    outer.step = step
    undo = ExitStack()
    undo.callback(put_back)
    return undo
