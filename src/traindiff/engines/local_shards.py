"""What a rank holds of a tensor that it observes: boxes of the global tensor, and which terms or copies they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from traindiff.observation import Merge
from traindiff.region import Region
from traindiff.shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalShard:
    """What this rank holds of a tensor.

    Attributes:
        tensor: The local elements.
        shard: Which elements of the global tensor they are.
        merge: How they merge with those of other ranks and micro-steps.
        term: Which term of a sum or mean they are; see `Observation`.
    """

    tensor: Tensor
    shard: Shard
    merge: Merge
    term: int


def shards_in(local: Tensor, region: Region, shard: Shard, merge: Merge, *, term: int) -> Iterator[LocalShard]:
    """A local tensor as boxes of the global one.

    Args:
        local: The local elements.
        region: Where they lie.
        shard: What the global tensor is of something larger, e.g. one micro-batch of the batch.
        merge: How the tensor as a whole merges.
        term: Which term of a sum or mean it is.
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
