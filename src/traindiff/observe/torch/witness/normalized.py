"""The normalized input of a normalization, which its weight multiplies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import log
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from traindiff.core.kernels.projection import normalized
from traindiff.core.torch_compat.autograd import keeps_saved_tensors_elsewhere, version_of
from traindiff.core.torch_compat.training import AnyBatchNorm, AnyInstanceNorm, dims_of_sample
from traindiff.observe.torch.witness.errors import KEPT_AWAY, NotWitnessedError

RMSNorm: Any = getattr(nn, "RMSNorm", nn.LayerNorm)
"""Since torch 2.4."""


class Normalized:
    """The normalized input of a call, computed when the gradient of its output is there.

    The graph holds the input as long; with activation checkpointing it does not, and the input comes from the second
    forward pass, before or after the gradient.

    Args:
        module: The layer.
        given: Its input.

    Attributes:
        shape: Shape of the input.
        then: Called once as soon as the input is known, if it was not when the gradient came.
    """

    def __init__(self, module: Any, given: Tensor) -> None:
        self._module = module
        self.shape = given.shape
        self._given: Tensor | None = None
        self._version = 0
        self._running: tuple[Tensor, Tensor] | None = None
        self.then: Callable[[], None] | None = None
        if not _uses_own_statistics(module):
            mean, variance = module.running_mean, module.running_var
            assert mean is not None
            assert variance is not None
            self._running = mean.detach().clone(), variance.detach().clone()
        if not keeps_saved_tensors_elsewhere():
            self.take(given)

    @property
    def waits(self) -> bool:
        """True if the input is not known yet."""
        return self._given is None

    def take(self, given: Tensor) -> None:
        """Keep the input of the call, or of its second forward pass, for which `then` may wait."""
        if given.shape == self.shape:
            self._given, self._version = given.detach(), version_of(given)
            then, self.then = self.then, None
            if then is not None:
                then()

    def projected(self, gradient: Tensor, signs: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rows of the normalized input times the gradient, times signs; None if rows are not what is normalized.

        The second tensor is the `shift`.

        Args:
            gradient: Gradient of the output, in the shape of the input.
            signs: Of the elements of a row.

        Raises:
            NotWitnessedError: The input is not known any more.
        """
        x, module = self._checked(), self._module
        centered = isinstance(module, nn.LayerNorm)
        if not (centered or isinstance(module, RMSNorm)) or x.dtype != gradient.dtype:
            return None
        x, gradient = (one.reshape(-1, signs.shape[1]) for one in (x, gradient))
        return normalized(x, gradient, signs, eps=self._eps(x), centered=centered)

    def _eps(self, given: Tensor) -> float:
        """What is added to a mean of squares."""
        eps = self._module.eps
        return _default_eps(given.dtype, given.device.type) if eps is None else float(eps)

    def _checked(self) -> Tensor:
        x = self._given
        if x is None:
            raise NotWitnessedError(KEPT_AWAY)
        if version_of(x) != self._version:
            raise NotWitnessedError("the input of its layer was written to")
        return x

    def __call__(self) -> Tensor:
        """The normalized input, in float32 at least.

        Raises:
            NotWitnessedError: The input is not known any more.
        """
        given = self._checked()
        x = given.to(torch.promote_types(given.dtype, torch.float32))
        module = self._module
        if isinstance(module, nn.LayerNorm):
            return functional.layer_norm(x, module.normalized_shape, None, None, module.eps)
        if isinstance(module, RMSNorm):
            return functional.rms_norm(x, module.normalized_shape, None, self._eps(given))
        if isinstance(module, nn.GroupNorm):
            return functional.group_norm(x, module.num_groups, None, None, module.eps)
        if isinstance(module, AnyInstanceNorm):
            batched = x if is_batched(module, x) else x[None]
            found = functional.instance_norm(batched, use_input_stats=True, eps=module.eps)
            return found if batched is x else found[0]
        if self._running is None:
            return functional.batch_norm(x, None, None, training=True, eps=module.eps)
        mean, variance = (one.to(x.dtype) for one in self._running)
        return functional.batch_norm(x, mean, variance, eps=module.eps)

    def shift(self, gradient: Tensor) -> Tensor:
        """See `Products`, for the gradient of the output; float64, a scalar.

        Raises:
            NotWitnessedError: The input is not known any more.
        """
        given, module = self._checked(), self._module
        if isinstance(module, RMSNorm) and not isinstance(module, nn.LayerNorm):
            return torch.zeros((), dtype=torch.float64, device=gradient.device)
        x, g = (one.to(torch.promote_types(given.dtype, torch.float32)) for one in (given, gradient))
        x, g, dims = _sharing(module, x, g)
        if self._running is None:
            variance, mean = torch.var_mean(x, dims, correction=0)
        else:
            mean, variance = (one.to(x.dtype) for one in self._running)
        square, lost = mean.double().square(), 4.0 * torch.finfo(x.dtype).eps
        # A GroupNorm in channels-last computes the variance as a difference of squares.
        far = square / ((variance.double() - lost * square).clamp_min(0.0) + module.eps)
        total: Tensor = (far * g.double().square().sum(dims)).sum()
        return total


def _sharing(module: Any, given: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The input and the gradient of a normalization, and the axes whose elements share a mean, as views."""
    if isinstance(module, nn.LayerNorm):
        return given, gradient, tuple(range(-len(module.normalized_shape), 0))
    if isinstance(module, nn.GroupNorm):
        sizes = (module.num_groups, -1)
        return given.unflatten(1, sizes), gradient.unflatten(1, sizes), tuple(range(2, given.dim() + 1))
    if isinstance(module, AnyInstanceNorm):
        return given, gradient, tuple(range(-dims_of_sample(module) + 1, 0))
    return given, gradient, (0, *range(2, given.dim()))


@cache
def _default_eps(dtype: torch.dtype, device: str) -> float:
    """What an RMSNorm without a number of its own adds.

    torch's documentation says the machine epsilon of the input's dtype. For bfloat16 and float16, newer versions take
    that of float32, so torch is asked.
    """
    least = 2.0**-20
    own, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
    given = torch.full((1,), least, dtype=dtype, device=device)
    found = (least / float(functional.rms_norm(given, (1,)))) ** 2
    return min((own, single), key=lambda eps: abs(log(found / eps)))


def _uses_own_statistics(module: Any) -> bool:
    """True if a normalization uses the statistics of its input, and not running ones."""
    if isinstance(module, AnyInstanceNorm):
        if not (module.training or not module.track_running_stats):
            raise NotWitnessedError("an InstanceNorm in evaluation mode is not known")
        return True
    return bool(module.training or module.running_mean is None) if isinstance(module, AnyBatchNorm) else True


def is_as_called(module: Any, *, training: bool) -> bool:
    """False if a module is a normalization that has another mode than in a call, or used running statistics.

    These may change until the backward pass.
    """
    if not isinstance(module, (AnyBatchNorm, AnyInstanceNorm)):
        return True
    return module.training == training and (training or module.running_mean is None)


def is_batched(module: Any, given: Tensor) -> bool:
    """True if the input of a normalization has a batch axis; an InstanceNorm also takes one sample."""
    if isinstance(module, AnyInstanceNorm):
        return given.dim() == dims_of_sample(module) + 1
    return True
