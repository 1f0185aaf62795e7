"""Parameters by their names, before and after an engine has wrapped a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from traindiff.setups.request import Request
from traindiff.site import canonical_path


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
            says=f"is {type(optimizer).__name__}, which has state before its first step: {request.setup.engine} "
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
                says=f"steps {len(unknown)} tensors that are no parameters of the model (shapes {shapes}).",
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
