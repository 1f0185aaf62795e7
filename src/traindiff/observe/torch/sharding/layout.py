"""How this rank's tensors lie in the global ones, and the factors that the engine multiplies them by."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from torch import Tensor, distributed, nn

from traindiff.core.kernels.torch_arrays import shape_of
from traindiff.core.observation import WITNESS, Merge
from traindiff.core.shards import Box, DeclaredShard, Piece, Region, Regions, Shard
from traindiff.core.torch_compat.training import localized_layout
from traindiff.core.witness import EXPECTED, LAYERS
from traindiff.observe.torch.sharding.data_parallel import DataParallel, Divisors, Pipeline, find_data_parallel
from traindiff.observe.torch.sharding.declarations import Declarations
from traindiff.observe.torch.sharding.distributed_tensor import is_distributed, region_of, region_placed
from traindiff.observe.torch.sharding.flat_parameters import FlatParameters
from traindiff.observe.torch.sharding.provenance import regions_of
from traindiff.observe.torch.sharding.registry import ENGINES


class LocalShard(NamedTuple):
    """One part of a tensor that this rank holds.

    Attributes:
        tensor: The local elements.
        shard: Which elements of the global tensor they are.
        merge: How they merge with those of other ranks and micro-steps.
        term: The number of their term of a sum or mean; see `Observation`.
    """

    tensor: Tensor
    shard: Shard
    merge: Merge
    term: int


def shards_in(local: Tensor, region: Region, shard: Shard, merge: Merge, *, term: int) -> Iterator[LocalShard]:
    """A local tensor as boxes of the global one.

    Args:
        local: The local elements.
        region: The region of the global tensor that they cover.
        shard: The part that the global tensor is of a larger one, e.g. one micro-batch of the batch.
        merge: How the tensor as a whole merges.
        term: The number of its term of a sum or mean.
    """
    whole = shard.offset if len(shard.offset) == len(region.shape) else (0,) * len(region.shape)
    for box in region.boxes():
        part = local
        for dim, (first, length) in enumerate(zip(box.first, box.shape, strict=True)):
            if length != local.shape[dim]:
                part = part.narrow(dim, first, length)
        yield LocalShard(
            tensor=part,
            shard=Shard(
                shape=box.shape,
                global_shape=shard.global_shape,
                offset=tuple(first + more for first, more in zip(whole, box.offset, strict=True)),
                spacing=shard.spacing,
            ),
            merge=merge if region.term is None else "sum",
            term=term,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one rank's tensors lie in those of the whole training.

    Attributes:
        data: This rank's place among the ranks that share the batch.
        divisors: Reads by which numbers the engine divides gradients.
        flat: Flat parameters. Their data is sometimes a part and sometimes the whole, so it is looked up when needed.
        declarations: The user's declarations of plain tensors.
        parameters: The regions of plain parameters that are parts of larger ones, by canonical path.
    """

    data: DataParallel
    divisors: Divisors
    flat: FlatParameters
    declarations: Declarations
    parameters: Mapping[str, Region] = field(default_factory=dict)

    def ranges_of(self, parameter: Tensor, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """The same pieces, with the elements that this rank holds of a DTensor, or of a declared shard.

        A shard that is made of several boxes has a piece for each, if they lie one after the other in the local tensor.

        Args:
            parameter: A parameter of an optimizer.
            pieces: The pieces of the model's parameters in it.
        """
        if len(pieces) != 1 or pieces[0].shard is not None:
            return pieces
        distributed_one, path = is_distributed(parameter), pieces[0].path
        plain = None if distributed_one else self.region_of_parameter(parameter, path=path, phase="param")
        region = region_of(parameter) if distributed_one else plain
        if region is None:
            return pieces
        boxes = list(region.boxes())
        if region.term is not None or any(not _is_range(box, region.local_shape) for box in boxes):
            return pieces if distributed_one else ()
        row = prod(region.local_shape[1:])
        return tuple(
            Piece(
                path=path, first=box.first[0] * row if box.first else 0,
                shard=Shard(shape=box.shape, global_shape=region.shape, offset=box.offset),
            )
            for box in boxes
            if prod(box.shape)
        )  # fmt: skip

    def local_shards(
        self, tensor: Tensor, shard: Shard, merge: Merge, *, phase: str, region: Region | None
    ) -> Iterable[LocalShard]:
        """The parts of a tensor that this rank holds, without any collective.

        Args:
            tensor: The observed tensor.
            shard: The part that the global tensor is of a larger one, e.g. one micro-batch of the batch.
            merge: How the tensor as a whole merges.
            phase: Phase of the observation.
            region: The region of a plain tensor, if it is known. Tensors of an engine know theirs.
        """
        tensor, lies = kept_here(tensor)
        if isinstance(lies, Shard):
            return (LocalShard(tensor, lies, merge, self.data.rank),)
        region = lies or region
        if region is not None:
            term = self.data.term + self.data.num_terms * (region.term or 0)
            return shards_in(tensor, region, shard, merge, term=term)
        term = self.data.term
        if self.data.alike > 1 and merge == "shard" and phase in ("forward", "backward"):
            # Not a copy of the tensors of other ranks, as far as is known.
            term += self.data.num_terms * (1 + distributed.get_rank())
        return (LocalShard(tensor, shard, merge, term),)

    def regions_of(self, tensor: Tensor, path: str, slot: str) -> Regions | None:
        """The regions of a plain activation and its gradient; None if they are unknown, or for a DTensor.

        Args:
            tensor: The activation with its graph, or an input of the model.
            path: Canonical path of the module that returned it.
            slot: Slot of the output or input.
        """
        if self.data.alike == 1 or is_distributed(tensor):
            return None
        return self.declarations.regions_of(tensor, path, slot) or regions_of(tensor)

    def region_of_parameter(self, tensor: Tensor, *, path: str, phase: str) -> Region | None:
        """The region of a plain parameter, its gradient or state; None if it is whole, or for a DTensor."""
        region = self.parameters.get(path) if self.parameters and phase in ("param", "grad", "optimizer") else None
        return region if region is not None and region.local_shape == shape_of(tensor) else None

    def factor(self, *, phase: str, stage: str, path: str, slot: str) -> float:
        """The engine's factor in such a tensor, relative to the gradient of the loss over the global batch."""
        if self.data.is_whole or not is_before_the_reduction(phase=phase, stage=stage, slot=slot):
            return 1.0
        return self.data.factor_of(path) if phase == "grad" else self.data.factor


def _is_range(box: Box, local_shape: Sequence[int]) -> bool:
    """True if a box is a range of rows of the local tensor."""
    return box.shape[1:] == tuple(local_shape[1:])


def kept_here(tensor: Tensor) -> tuple[Tensor, Region | Shard | None]:
    """The part of a tensor that this rank keeps between uses, and its place; the tensor itself without an engine.

    Raises:
        UnsupportedTensorError: The engine has moved the elements away.
    """
    for engine in ENGINES:
        if (kept := engine.kept(tensor)) is not None:
            return kept
    return tensor, None


def find_layout(model: nn.Module, *, shards: Sequence[DeclaredShard], modules: Collection[str]) -> Layout:
    """The layout of a model's tensors, as far as the model shows it and the user declares it.

    Args:
        model: The root module.
        shards: The user's declarations of plain tensors.
        modules: Canonical paths of the modules.

    Raises:
        ConfigError: A declared axis is unknown.
    """
    declarations = Declarations(shards, model, modules)
    divisors = Divisors(model)
    data = divisors.read(find_data_parallel(model, declarations))
    flat = FlatParameters([one for engine in ENGINES for one in engine.flat_parameters(model)])
    return Layout(data=data, divisors=divisors, flat=flat, declarations=declarations)


def in_pipeline(layout: Layout, model: nn.Module, pipeline: Pipeline) -> Layout:
    """The layout after this rank turned out to have stages of a pipeline."""
    divisors = Divisors(model)
    data = divisors.read(find_data_parallel(model, layout.declarations, pipeline))
    return replace(layout, data=data, divisors=divisors)


def with_divisors(layout: Layout) -> Layout:
    """The layout with the divisors that the training has set by now; the same object if it has set no others."""
    data = layout.divisors.read(layout.data)
    return layout if data is layout.data else replace(layout, data=data)


def regions_of_parameters(layout: Layout, parameters: Mapping[str, Tensor]) -> dict[str, Region]:
    """The regions of plain parameters that are parts of larger ones, by canonical path.

    Raises:
        ConfigError: A declaration does not fit a parameter.
    """
    found = layout.declarations.of_parameters(parameters)
    for path, parameter in parameters.items():
        if (spec := localized_layout(parameter)) is not None:
            found[path] = region_placed(spec.shape, spec.mesh, spec.placements)
    return found


def is_before_the_reduction(*, phase: str, stage: str, slot: str) -> bool:
    """True if data-parallel ranks have different values of such a tensor: each of its own share of the loss."""
    if phase == "grad":
        return stage == "micro" or (stage == WITNESS and slot in (EXPECTED, LAYERS))
    return phase == "backward" or (phase, slot) == ("loss", "backward")


def is_before_unscaling(*, phase: str, stage: str, slot: str) -> bool:
    """True if such a tensor contains the loss scale, if there is one."""
    return is_before_the_reduction(phase=phase, stage=stage, slot=slot) or (phase, stage) == ("grad", "reduced")
