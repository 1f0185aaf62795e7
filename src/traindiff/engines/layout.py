"""Where the engine has put things: which part of which global tensor this rank observes, and by what it is scaled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, distributed, nn

from traindiff.engines.data_parallel import DataParallel, find_data_parallel
from traindiff.engines.deepspeed_parameters import is_partitioned, kept_part
from traindiff.engines.distributed_tensor import is_distributed, local_tensor, place_of
from traindiff.engines.flat_parameters import FlatParameters, find_flat_parameters
from traindiff.engines.local_parts import LocalPart, parts_at
from traindiff.engines.provenance import places_of
from traindiff.observation import Merge
from traindiff.place import Place, Places
from traindiff.shard import Piece, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How one rank's tensors lie in those of the whole training.

    Attributes:
        data: This rank's place among those that share the batch.
        pieces: By id of a parameter that the engine has flattened or cut: what it holds of which parameters.
            Those that are not in it are whole, or DTensors.
        flat: Flat parameters, whose data is now a part and now the whole: looked up when it is needed.
    """

    data: DataParallel
    pieces: Mapping[int, tuple[Piece, ...]] = field(default_factory=dict)
    flat: FlatParameters = field(default_factory=FlatParameters)

    def pieces_of(self, parameter: Tensor, size: int | None = None) -> tuple[Piece, ...] | None:
        """What a parameter that the engine has flattened or cut holds now; None for any other.

        Args:
            parameter: What an optimizer holds, or autograd differentiates by.
            size: Elements of its gradient, where that is asked for and may be of another size.
        """
        if (found := self.pieces.get(id(parameter))) is not None:
            return found
        return self.flat.pieces_of(parameter, size)

    def local_parts(
        self, tensor: Tensor, shard: Shard, merge: Merge, *, phase: str, place: Place | None
    ) -> Iterator[LocalPart]:
        """The parts of a tensor that this rank holds, without any collective.

        Args:
            tensor: What a tap observes.
            shard: What the tensor as a whole is of something larger, e.g. one micro-batch of the batch.
            merge: How the tensor as a whole merges.
            phase: Of the observation.
            place: Where a plain tensor lies; None where that is not known. A DTensor knows it itself.
        """
        if is_partitioned(tensor):
            kept, part = kept_part(tensor)
            yield LocalPart(tensor=kept, shard=part, merge=merge, term=self.data.rank)
            return
        if is_distributed(tensor):
            place, tensor = place_of(tensor), local_tensor(tensor)
        if place is not None:
            term = self.data.rank + self.data.size * (place.term or 0)
            yield from parts_at(tensor, place, shard, merge, term=term)
            return
        term = self.data.rank
        if self.data.alike > 1 and merge == "shard" and phase in ("forward", "backward"):
            # No copy of what other ranks hold, as far as is known.
            term += self.data.size * (1 + distributed.get_rank())
        yield LocalPart(tensor=tensor, shard=shard, merge=merge, term=term)

    def places_of(self, tensor: Tensor, path: str, slot: str) -> Places | None:  # noqa: ARG002
        """Where a plain activation and its gradient lie; None where that is not known, or for a DTensor.

        Args:
            tensor: The activation, with its graph.
            path: Canonical path of the module that returned it.
            slot: Which of its outputs.
        """
        return places_of(tensor) if self.data.alike > 1 and not is_distributed(tensor) else None

    def factor(self, *, phase: str, stage: str, slot: str) -> float:
        """What the engine multiplies such a tensor by, relative to the gradient of the loss over the global batch."""
        return self.data.factor if is_before_the_reduction(phase=phase, stage=stage, slot=slot) else 1.0

    def to_json(self) -> dict[str, Any] | None:
        """For `run.json`; None for a single process."""
        return self.data.to_json()


def find_layout(model: nn.Module) -> Layout:
    """How the engine that `model` is prepared for lays tensors out, as far as the model tells."""
    return Layout(data=find_data_parallel(model), flat=find_flat_parameters(model))


def is_before_the_reduction(*, phase: str, stage: str, slot: str) -> bool:
    """Whether each of several data-parallel ranks has a number of its own, of its own share of the loss."""
    return phase == "backward" or (phase, slot) == ("loss", "backward") or (phase, stage) == ("grad", "micro")
