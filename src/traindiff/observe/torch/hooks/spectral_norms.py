"""Observe whether the spectral norms of weights were estimated before a module is evaluated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.spectral_norm import SpectralNorm

from traindiff.core.observation import ESTIMATE
from traindiff.core.site import path_in_whole
from traindiff.core.torch_compat.training import FORWARD_PRE_HOOKS
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.nested import as_tensor

LEAST = 0.5
"""Below this, the vectors are no result of an iteration, which gives 1. Random ones give about n^-1/2 for n rows."""


def attach(context: TapContext) -> None:
    """Look at `torch.nn.utils.spectral_norm` before forward passes in evaluation mode, until each was estimated.

    It divides a weight W by u'Wv. An iteration, which only training mode makes, sets u = Wv / ||Wv||, so that
    u'Wv = ||Wv||. Before the first one, u and v are random, and so is the estimate. Two products of a matrix and a
    vector are computed for each such weight; nothing is changed.
    """
    tap = _SpectralNorms(context)
    if tap.waiting:
        context.events.before_forward.append(context.sink.guarded("spectral_norms", tap.look))


class _SpectralNorms:
    """The weights whose estimate was not seen to be one; those that have a norm when the recording begins.

    Attributes:
        waiting: The module and its norm, by canonical path of the weight.
    """

    def __init__(self, context: TapContext) -> None:
        self._sink = context.sink
        self.waiting: dict[str, tuple[nn.Module, SpectralNorm]] = {}
        for path, module in context.targets.modules.items():
            for norm in getattr(module, FORWARD_PRE_HOOKS).values():
                if type(norm) is SpectralNorm:
                    self.waiting[f"{path_in_whole(path)}.{norm.name}".removeprefix(".")] = module, norm
        context.undo.callback(self.waiting.clear)

    def look(self) -> None:
        """Record the estimates that are none."""
        for path, (module, norm) in list(self.waiting.items()) if self._sink.progress.observing else ():
            if module.training:
                continue
            value = estimate(module, norm)
            if value is None or not value < LEAST:  # NaN is no estimate that could become better
                del self.waiting[path]
            else:
                call = self._sink.progress.next_call(path, ESTIMATE)
                self._sink.emit(as_tensor(value), phase="forward", path=path, slot="sigma", stage=ESTIMATE, call=call)


def estimate(module: nn.Module, norm: SpectralNorm) -> float | None:
    """U'Wv / ||Wv|| for the weight W of a module and the vectors u and v that it keeps; None if that has no value."""
    weight, u, v = (getattr(module, f"{norm.name}_{part}", None) for part in ("orig", "u", "v"))
    if not (isinstance(weight, Tensor) and isinstance(u, Tensor) and isinstance(v, Tensor)):
        return None
    with torch.no_grad():
        product = norm.reshape_weight_to_matrix(weight.detach()).to(torch.float64) @ v.to(torch.float64)
        size = float(product.norm())
        return float(product @ u.to(torch.float64)) / size if size else None
