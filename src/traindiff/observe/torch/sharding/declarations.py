"""The regions of plain tensors, as the user declared how ranks divide them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from math import prod

from torch import Tensor, distributed, nn

from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.shards import DeclaredShard, Region, Regions
from traindiff.core.site import ROOT, matches
from traindiff.errors import ConfigError, Problem
from traindiff.observe.torch.sharding.distributed_tensor import MeshAxis, axis_of
from traindiff.observe.torch.sharding.provenance import viewed

_AXIS_FIX = 'Give the DeviceMesh of that axis or its process group: axis=mesh["tp"], or axis=group.'

Declared = tuple[DeclaredShard, MeshAxis]


class Declarations:
    """The declarations of the user, and which of them matched something.

    Without a process group no ranks divide anything, and the declarations are ignored.

    Args:
        given: From `record(shards=...)`.
        model: The root module.
        modules: Canonical paths of its modules.

    Raises:
        ConfigError: A declared axis is unknown.
    """

    def __init__(self, given: Sequence[DeclaredShard], model: nn.Module, modules: Collection[str]) -> None:
        self._all: list[Declared] = []
        problems: list[Problem] = []
        if given and distributed.is_available() and distributed.is_initialized():
            for one in given:
                axis = axis_of(one.axis, model)
                if isinstance(axis, MeshAxis):
                    self._all.append((one, axis))
                else:
                    where = f"record(shards=...), {one.pattern!r}"
                    problems.append(Problem(where=where, what=axis, fix=_AXIS_FIX))
        if problems:
            raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")
        self._modules = frozenset(modules)
        self._unused = dict.fromkeys(one for one, _ in self._all)
        self._misfits: dict[DeclaredShard, str] = {}
        self._asked = False
        self._input_shape: tuple[int, ...] = ()

    @property
    def unused(self) -> tuple[str, ...]:
        """Messages about declarations that have matched nothing so far; empty before the first tensor is seen."""
        if not self._asked:
            return ()
        return tuple(self._misfits.get(one, f"{one} matches nothing that was observed.") for one in self._unused)

    def axes(self, *, of_samples: bool) -> list[MeshAxis]:
        """The axes over which each sample is divided, or the other axes, over which the model is divided."""
        samples = {axis.ranks for one, axis in self._all if matches(one.pattern, "") and one.dim is not None}
        every = {axis.ranks: axis for _, axis in self._all}
        return [axis for ranks, axis in every.items() if (ranks in samples) == of_samples]

    def of_parameters(self, parameters: Mapping[str, Tensor]) -> dict[str, Region]:
        """Regions of the declared parameters, by canonical path.

        Raises:
            ConfigError: A declaration does not fit a parameter.
        """
        found: dict[str, Region] = {}
        problems: list[Problem] = []
        declared = [one for one in self._all if not any(matches(one[0].pattern, path) for path in self._modules)]
        for path, parameter in parameters.items():
            chosen = [one for one in declared if matches(one[0].pattern, path)]
            if not chosen:
                continue
            region = self._region(shape_of(parameter), chosen)
            if isinstance(region, Region):
                found[path] = region
            else:
                fix = "Declare how the rank's own tensor is divided, dims counted from 0."
                problems.append(Problem(where=f"record(shards=...), {path}", what=region, fix=fix))
        if problems:
            raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")
        return found

    def regions_of(self, tensor: Tensor, path: str, slot: str) -> Regions | None:
        """The regions of an activation, or an input of the model, and its gradient; None if no declaration matches.

        If the inputs of the model are declared, a tensor that begins with the same dims, or with these dims merged
        into one, is divided like them.
        """
        if not self._all:
            return None
        self._asked = True
        shape, is_input = shape_of(tensor), not path and slot.startswith("input")
        site = f"{path or ROOT} {slot}"
        chosen = [
            one
            for one in self._all
            if matches(one[0].pattern, path) or fnmatchcase(site, one[0].pattern.replace("[", "[[]"))
        ]
        if is_input and chosen:
            self._input_shape = shape
        region = self._region(shape, chosen) if chosen else self._like_inputs(shape)
        if not isinstance(region, Region):
            return None
        # Each term of a sum has the gradient of the sum.
        return Regions(value=region, gradient=replace(region, term=None))

    def _like_inputs(self, shape: tuple[int, ...]) -> Region | None:
        """The region of a tensor that begins with the dims of the inputs, or with these merged into one dim."""
        dims = len(self._input_shape)
        declared = [one for one in self._all if matches(one[0].pattern, "") and one[0].dim is not None]
        if not dims or not declared:
            return None
        first = max((one.dim or 0) % dims for one, _ in declared) + 1
        begins = self._input_shape[:first]
        merged = shape[:1] == (prod(begins),)
        if shape[:first] != begins and not merged:
            return None
        region = self._region(shape if shape[:first] == begins else (*begins, *shape[1:]), declared)
        return viewed(region, shape) if isinstance(region, Region) else None

    def _region(self, shape: tuple[int, ...], chosen: Sequence[Declared]) -> Region | str:
        """The region of a local tensor with this shape, or why a declaration does not fit it."""
        whole, cuts, terms = list(shape), [], []
        axes: set[tuple[int, ...]] = set()
        for one, axis in chosen:
            if axis.ranks in axes:
                self._unused.pop(one, None)
                continue
            axes.add(axis.ranks)
            if one.dim is not None:
                if not -len(shape) <= one.dim < len(shape):
                    return self._misfit(one, f"has {len(shape)} dims and no dim {one.dim}.")
                dim = one.dim % len(shape)
                if whole[dim] % one.blocks:
                    return self._misfit(one, f"has length {whole[dim]} in dim {dim}: not {one.blocks} equal blocks.")
                whole[dim] *= axis.size
                cuts.append((dim, one.blocks, axis))
            elif one.partial:
                terms.append(axis)
            self._unused.pop(one, None)
        region = Region.whole(whole)
        for dim, blocks, axis in cuts:
            region = region.cut(dim, size=axis.size, index=axis.index, blocks=blocks)
        for axis in terms:
            region = region.summed(size=axis.size, index=axis.index)
        return region

    def _misfit(self, one: DeclaredShard, what: str) -> str:
        self._misfits[one] = f"what {one.pattern!r} matches {what}"
        return what
