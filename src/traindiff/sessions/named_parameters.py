"""What a model calls its parameters, whatever an engine has put in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from traindiff.engines.flat_parameters import FlatParameters
from traindiff.engines.registry import ENGINES
from traindiff.site import canonical_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedParameters:
    """The parameters of a model by canonical path.

    Attributes:
        tensors: What holds each of them (or a part of it, or several), by path; tied ones under their first name.
        tied: Path of a parameter by each of its further names.
        ids: Canonical path of every tensor that is a parameter to torch, by id: those that an engine made, too.
        shapes: Global shapes by path, where they are not those of the tensors.
    """

    tensors: Mapping[str, nn.Parameter]
    tied: Mapping[str, str]
    ids: Mapping[int, str]
    shapes: Mapping[str, tuple[int, ...]]

    def first(self, path: str) -> str:
        """The name under which a parameter is filed."""
        return self.tied.get(path, path)


def named_parameters(model: nn.Module, flat: FlatParameters) -> NamedParameters:
    """Look up the parameters of a model.

    Args:
        model: The module that the training loop calls.
        flat: What the engine has flattened.
    """
    found = dict(model.named_parameters(remove_duplicate=False))
    canonical = canonical_paths(found)
    every = {path: found[name] for name, path in canonical.items()}
    first: dict[int, str] = {}
    for path, parameter in every.items():
        first.setdefault(id(parameter), path)
    tied = {path: first[id(parameter)] for path, parameter in every.items() if first[id(parameter)] != path}
    tensors = {path: parameter for path, parameter in every.items() if path not in tied}
    shapes = {
        path: shape
        for path, parameter in tensors.items()
        for engine in ENGINES
        if (shape := engine.global_shape(parameter)) is not None
    }
    for one in flat:
        first.setdefault(id(one.tensor), one.name)
        tensors.pop(canonical.get(one.name, ""), None)
        for member in one.members:
            tensors[member.path] = one.tensor if member.parameter is None else member.parameter
            tied.update((other, member.path) for other in member.others)
            shapes[member.path] = member.shape
    return NamedParameters(tensors=tensors, tied=tied, ids=first, shapes=shapes)
