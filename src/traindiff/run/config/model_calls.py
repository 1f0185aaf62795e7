"""How a recipe's loss calls the model, where the model is not in one place and cannot simply be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from traindiff.core.site import canonical_path
from traindiff.run.config.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How the parameters of a model are called.

    Attributes:
        by_id: The first name of each, by `id` of what holds it.
        first: The first name of each, by every name; tied ones have several.
    """

    by_id: dict[int, str]
    first: dict[str, str]


def names_of(model: nn.Module) -> Names:
    """Names of all parameters, without what wrappers put in front."""
    by_id: dict[int, str] = {}
    first: dict[str, str] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        name = canonical_path(path)
        first[name] = by_id.setdefault(id(parameter), name)
    return Names(by_id=by_id, first=first)


def follow(request: Request, optimizer: Optimizer, names: Names, *models: nn.Module) -> None:
    """Have an optimizer step what an engine has put in place of the parameters, in the same groups.

    Class and settings of the optimizer stay. Parameters that these models do not have leave their group, which may
    be empty then.

    Args:
        request: What is being built, for messages.
        optimizer: Is changed.
        names: Of the parameters before.
        models: What the engine has made; together they are what this rank holds.

    Raises:
        ConfigError: The optimizer steps something else, too, or has state already, of parameters as they were.
    """
    if optimizer.state:
        raise request.lacks(
            "optimizer",
            message=f"is {type(optimizer).__name__}, which has state before its first step: {request.setup.engine} "
            "divides parameters, and the state would not fit them.",
            fix="Use an optimizer that makes its state in its first step (Adam, AdamW, SGD), or engine=ddp.",
        )
    held = {
        names.first[name]: parameter
        for model in models
        for path, parameter in model.named_parameters(remove_duplicate=False)
        if (name := canonical_path(path)) in names.first
    }
    for group in optimizer.param_groups:
        if unknown := [parameter for parameter in group["params"] if id(parameter) not in names.by_id]:
            shapes = ", ".join(str(list(parameter.shape)) for parameter in unknown[:3])
            raise request.lacks(
                "optimizer",
                message=f"steps {len(unknown)} tensors that are no parameters of the model (shapes {shapes}).",
                fix="Make them parameters of the model, so that the engine knows them.",
            )
        called = [names.by_id[id(parameter)] for parameter in group["params"]]
        group["params"] = [held[name] for name in called if name in held]


def repeated_modules(model: nn.Module) -> list[nn.Module]:
    """What is wrapped by itself, as is usual: the layers in each `ModuleList`, of nested ones in the outermost.

    What a stage of a pipeline does not have may be None.
    """
    found: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            found += [layer for layer in child if layer is not None and any(True for _ in layer.parameters())]
        else:
            found += repeated_modules(child)
    return found


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
                message="calls the model twice for one batch, which a pipeline cannot compute.",
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
        message="does not call the model that it is given, so that a pipeline cannot compute it.",
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
