"""How a recipe's loss calls the model, where the model is not in one place and cannot simply be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from traindiff.setups.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """What a model is called with.

    Attributes:
        args: Positional arguments.
        kwargs: Arguments by name.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Called(BaseException):  # no error, and nothing that a loss should catch
    """Ends a loss as soon as it calls the model."""

    def __init__(self, call: ModelCall) -> None:
        super().__init__()
        self.call = call


class _Asking(nn.Module):
    """Stands in for the model to learn what it is called with."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Never returns."""
        raise _Called(ModelCall(args=args, kwargs=kwargs))


class _Answering(nn.Module):
    """Stands in for the model to give an output that has been computed elsewhere, once."""

    def __init__(self, request: Request, output: Any) -> None:
        super().__init__()
        self.request = request
        self.outputs = [output]

    def forward(self, *_: Any, **__: Any) -> Any:
        """The output.

        Raises:
            ConfigError: It is asked for again.
        """
        if not self.outputs:
            raise self.request.lacks(
                "loss",
                says="calls the model twice for one batch, which a pipeline cannot compute.",
                fix="Call the first argument of loss once for all samples.",
            )
        return self.outputs.pop()


def captured_call(request: Request, batch: Any) -> ModelCall:
    """What the recipe's loss calls the model with, for a batch.

    Raises:
        ConfigError: It does not call the model.
    """
    try:
        request.loss(_Asking(), batch)
    except _Called as called:
        return called.call
    raise request.lacks(
        "loss",
        says="does not call the model that it is given, so that a pipeline cannot compute it.",
        fix="Call the first argument of loss once, as a function: model(inputs).",
    )


def loss_of_output(request: Request, output: Any, batch: Any) -> Tensor:
    """The recipe's loss of a batch for which the model's output is there.

    Raises:
        ConfigError: It calls the model more than once.
    """
    return request.loss(_Answering(request, output), batch)


def joined(calls: Sequence[ModelCall]) -> ModelCall:
    """One call for several parts of a batch: tensors one below the other, everything else as in the first."""
    args = tuple(_joined([call.args[place] for call in calls]) for place in range(len(calls[0].args)))
    kwargs = {name: _joined([call.kwargs[name] for call in calls]) for name in calls[0].kwargs}
    return ModelCall(args=args, kwargs=kwargs)


def _joined(values: Sequence[Any]) -> Any:
    first = values[0]
    return torch.cat(list(values)) if isinstance(first, Tensor) and first.ndim else first
