"""Determinism controls: run a training without dropout, with deterministic algorithms, or on one thread."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from traindiff.core.torch_compat.training import modules_in

DROPOUT, ALGORITHMS, THREADS = "dropout", "algorithms", "threads"

CONTROLS: Mapping[str, str] = {
    DROPOUT: "no dropout",
    ALGORITHMS: "deterministic algorithms",
    THREADS: "one thread",
}
"""The controls, with a few words for users."""

_PLACE_OF_P: Mapping[Any, tuple[str, int]] = {
    functional.dropout: ("p", 1),
    functional.dropout1d: ("p", 1),
    functional.dropout2d: ("p", 1),
    functional.dropout3d: ("p", 1),
    functional.alpha_dropout: ("p", 1),
    functional.feature_alpha_dropout: ("p", 1),
    torch.dropout: ("p", 1),
    functional.scaled_dot_product_attention: ("dropout_p", 4),
    functional.multi_head_attention_forward: ("dropout_p", 10),
}
"""For each function: name and position of its dropout probability."""


_DROPPING = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class _WithoutDropout(TorchFunctionMode):
    """Sets the dropout probability of torch's functions to zero."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, named = list(args), dict(kwargs or {})
        if func in _PLACE_OF_P:
            name, place = _PLACE_OF_P[func]
            if len(given) > place:
                given[place] = 0.0
            else:
                named[name] = 0.0
        return func(*given, **named)


@contextmanager
def controlled(controls: Sequence[str]) -> Iterator[None]:
    """Run trainings inside under these `CONTROLS`; restore everything afterwards.

    `dropout` covers calls of torch's functions; `take_out_dropout` covers the modules. Numbers that a model draws
    itself, e.g. with `torch.bernoulli`, stay.
    """
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        with warnings.catch_warnings(), _WithoutDropout() if DROPOUT in controls else nullcontext():
            if THREADS in controls:
                torch.set_num_threads(1)
            if ALGORITHMS in controls:
                warnings.filterwarnings("ignore", message=".*deterministic")
                torch.use_deterministic_algorithms(True, warn_only=True)  # noqa: FBT003
            yield
    finally:
        if THREADS in controls:
            torch.set_num_threads(threads)
        if ALGORITHMS in controls:
            torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)


def take_out_dropout(model: nn.Module) -> None:
    """Set the dropout probability of torch's own modules to zero."""
    for module in modules_in(model):
        if isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            module.dropout = 0.0
        elif isinstance(module, _DROPPING):
            module.p = 0.0
