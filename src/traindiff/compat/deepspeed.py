"""ModelStepper, the debugger for two DeepSpeed engines, under its name, with its arguments and its output.

```python
from traindiff.compat.deepspeed import ModelStepper

stepper = ModelStepper(base_engine, test_engine, trainloader, num_batches=50, test_every=1)
success = stepper.go()
```

`traindiff.Lockstep` does the work; see `traindiff explain lockstep` for what differs on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from traindiff.analyse.compare.verdict import Comparison
from traindiff.errors import ConfigError, Problem
from traindiff.observe.torch.hooks.nested import replaced, tensors
from traindiff.run.lockstep.lockstep import Lockstep
from traindiff.run.lockstep.stepped import default_loss

_NOT_CALLED = frozenset({"_get_params", "_get_grads", "_step_batch", "_print_status"})
"""The original's methods that a subclass could override; here nothing calls them."""


class ModelStepper:
    """Train two engines on the same batches, and compare their parameters, gradients and losses.

    The engines compute their loss themselves: a batch that is a list or tuple gives the arguments of the model, a
    mapping its keyword arguments. `go` reads every attribute anew, so it can be changed and `go` called again.

    Args:
        engine_base: The trusted engine, or anything else that `traindiff.Lockstep` takes as a side.
        engine_test: The engine in question.
        loader: The batches of this rank.
        num_batches: Stop after this many batches; None for all.
        test_every: Compare every N steps, and in the last one.
        status_every: Print the losses of every N-th batch, and of the last.
        track_params: Compare parameters.
        track_loss: Compare losses.
        track_grads: Compare gradients.
        param_tol: Largest relative L2 difference of a parameter that passes; None for noise floors.
        loss_tol: The same for losses.
        grad_tol: The same for gradients.
        batch_data_fn: Makes the arguments of the model from a batch, for each engine. Without it, each engine is given
            copies of the batch's tensors on its device.

    Attributes:
        comparison: What `go` has found, in detail; None before.
        base_loss: The baseline's latest loss on this rank; -1 before the first.
        test_loss: The same of the engine in question.
    """

    def __init__(
        self,
        engine_base: Any,
        engine_test: Any,
        loader: Iterable[Any],
        num_batches: int | None = 10,
        test_every: int = 1,
        status_every: int = 1,
        track_params: bool = True,  # noqa: FBT001, FBT002  the original's arguments have places
        track_loss: bool = True,  # noqa: FBT001, FBT002  the original's arguments have places
        track_grads: bool = True,  # noqa: FBT001, FBT002  the original's arguments have places
        param_tol: float | None = 1e-4,
        loss_tol: float | None = 1e-4,
        grad_tol: float | None = 1e-4,
        batch_data_fn: Callable[[Any], Any] | None = None,
    ) -> None:
        self.base_eng = engine_base
        self.test_eng = engine_test
        self.loader = loader
        self.num_batches = num_batches
        self.test_every = test_every
        self.status_every = status_every
        self.track_params = track_params
        self.track_loss = track_loss
        self.track_grads = track_grads
        self.param_tol = param_tol
        self.loss_tol = loss_tol
        self.grad_tol = grad_tol
        self.batch_data_fn = batch_data_fn
        self.global_rank: int = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.device: Any = getattr(engine_base, "device", None)
        self.base_loss: Any = -1.0
        self.test_loss: Any = -1.0
        self.comparison: Comparison | None = None

    def __init_subclass__(cls) -> None:
        """Refuse a subclass that overrides what is never called.

        Raises:
            ConfigError: It overrides one of the original's own methods.
        """
        super().__init_subclass__()
        problems = [
            Problem(
                where=f"class {cls.__name__}(ModelStepper)",
                what=f"overrides {name}, which is never called.",
                fix="Leave it out: parameters and gradients are compared however the engines divide them.",
            )
            for name in sorted(_NOT_CALLED & vars(cls).keys())
        ]
        if problems:
            raise ConfigError("ModelStepper", problems, consequence="nothing was trained")

    def go(self) -> bool:
        """Train on the batches, or up to the first one in which the engines diverge.

        Returns:
            True if everything that was compared agrees; the same on every rank.

        Raises:
            ConfigError: A setting, or an engine, cannot be used. Nothing was trained.
            LockstepError: Another rank has run out of batches or failed.
        """
        stepper = Lockstep(
            self.base_eng, self.test_eng, self.loader, loss=self._loss, num_batches=self.num_batches,
            test_every=self.test_every, status_every=self.status_every, track_params=self.track_params,
            param_tol=self.param_tol, track_loss=self.track_loss, loss_tol=self.loss_tol,
            track_grads=self.track_grads, grad_tol=self.grad_tol,
        )  # fmt: skip
        self.comparison = stepper.go()
        return stepper.passed

    def _loss(self, engine: nn.Module, batch: Any) -> Tensor:
        if self.batch_data_fn is None:
            device = getattr(engine, "device", None)
            own = {id(one): one.detach().clone().to(device) for _, one in tensors(batch, "")}
            loss = default_loss(engine, replaced(batch, own))
        else:
            loss = default_loss(engine, self.batch_data_fn(batch))
        if engine is _model_of(self.base_eng):
            self.base_loss = loss.detach()
        else:
            self.test_loss = loss.detach()
        return loss


def _model_of(side: Any) -> Any:
    """The model of a side, which an engine is itself."""
    return side[0] if isinstance(side, (tuple, list)) else side
