"""One site of one step, merged over ranks and micro-steps: its key, its numbers, and findings at it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.placed_parts import Abridged, PlacedParts, ranks_of
from traindiff.analyse.merge.placed_parts import RankPart as RankPart
from traindiff.core.observation import ALL_GRADIENTS, LOSS_SCALE, Observation
from traindiff.core.summary import empty, is_finite, number
from traindiff.storage import Places

_GROUP = re.compile(r"(.*)\.groups\[(\d{1,9})\]")


@lru_cache(maxsize=1 << 16)
def _group(path: str) -> tuple[str, int] | None:
    match = _GROUP.fullmatch(path)
    return (match[1], int(match[2])) if match else None


class SiteKey(NamedTuple):
    """Identity of a site: observations of two runs are compared if their keys are equal."""

    phase: str
    stage: str
    path: str
    slot: str
    call: int = 0
    micro_step: int = 0  # 0 for what merges over micro-steps

    @property
    def of_step(self) -> SiteKey:
        """The key over all micro-steps: as a rule the same."""
        return self._replace(micro_step=0) if self.micro_step else self

    @property
    def of_calls(self) -> SiteKey:
        """The key over all calls and micro-steps: as a rule the same."""
        return self._replace(call=0, micro_step=0) if self.call or self.micro_step else self

    @property
    def group(self) -> tuple[str, int] | None:
        """Optimizer and number of the parameter group, if this is a setting of a group."""
        return _group(self.path) if self.phase == "optimizer" else None


class Bits(NamedTuple):
    """What identifies the bits of a merged site."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    factor: float
    fingerprint: int


@dataclass(slots=True, kw_only=True, unsafe_hash=True)  # frozen, each field would be set by a call
class MergedSite:
    """One site in one step, merged over ranks and micro-steps. Nothing may change its fields.

    Attributes:
        key: Its identity.
        order: Place of its first part in execution order. Logged scalars come after everything else.
        dtype: Dtype of its parts.
        shape: Global shape; the batch axis has the rows of all micro-steps and ranks.
        summary: The merged summary, relative to the global loss.
        exact: Whether fingerprints, counts and norms are those of the tensor. For a sum of partial observations, only
            the linear fields are known.
        parts: The parts that were merged, ordered by micro-step, then by rank. If `unobserved`, the parts without
            numbers.
        unobserved: Why there are no numbers.
        factor: Factor that the engine applied. `summary` is divided by it; its fingerprints are not.
        apart: Groups of ranks that hold different copies of one shard; empty if all copies agree.
        spread: The largest L2 distance between the copy that was taken and another one; 0 if all copies agree.
        batched: Whether axis 0 runs over the samples of all micro-steps and ranks.
        summed: Whether each rank and micro-step has one term of a sum.
        placed: Whether the places of the elements in the whole are known. If not, only what does not depend on them is:
            counts, sum and norm.
        origin: The bits from which a derived site was computed; empty for other sites, and if these bits are not known.
            Equal origins give equal values, but sums over other shards round otherwise.
        abridged: What is known of parts without numbers, in a compact recording; None elsewhere.
    """

    key: SiteKey
    order: int
    dtype: str
    shape: tuple[int, ...]
    summary: Any
    exact: bool = True
    parts: Sequence[RankPart] = ()
    unobserved: str = ""
    factor: float = 1.0
    apart: tuple[tuple[int, ...], ...] = ()
    spread: float = 0.0
    batched: bool = False
    summed: bool = False
    placed: bool = True
    origin: tuple[Bits, ...] = ()
    abridged: Abridged | None = None

    def without_parts(self, summary: Any = None) -> MergedSite:
        """A copy without parts, which would keep the whole step in memory; with a copy of its summary, if given."""
        values = list(_VALUES(self))
        values[_PARTS], values[_ABRIDGED] = (), None
        if summary is not None:
            values[_SUMMARY] = summary
        return filled(values)


NAMES = tuple(one.name for one in fields(MergedSite))
"""Names of the fields of an entry."""

_VALUES = attrgetter(*NAMES)
_SUMMARY, _PARTS, _ABRIDGED = map(NAMES.index, ("summary", "parts", "abridged"))


def filled(values: Sequence[Any]) -> MergedSite:
    """An entry with these fields, in their order: what a step makes by the thousand takes a fifth of the time so."""
    entry: MergedSite = object.__new__(MergedSite)
    (
        entry.key, entry.order, entry.dtype, entry.shape, entry.summary, entry.exact, entry.parts, entry.unobserved,
        entry.factor, entry.apart, entry.spread, entry.batched, entry.summed, entry.placed, entry.origin,
        entry.abridged,
    ) = values  # fmt: skip
    return entry


StepTable = Mapping[SiteKey, MergedSite]
"""One step of one run: its sites by key, in execution order."""

Part = tuple[Observation, int, Any]
"""An observation, its rank, its summary."""

GRADIENT_NORM = SiteKey("grad", "", ALL_GRADIENTS, "norm")
"""Key of the norm of all gradients, which is recomputed from their summaries."""


def gradient_norm(gradients: Sequence[MergedSite]) -> MergedSite:
    """The norm of several gradients, recomputed from their summaries; NaN if one of them is not finite."""
    broken = not all(is_finite(one.summary) for one in gradients)
    value = math.nan if broken else math.sqrt(sum(float(one.summary["sum_of_squares"]) for one in gradients))
    order = max(one.order for one in gradients)
    return MergedSite(
        key=GRADIENT_NORM, order=order, dtype="float64", shape=(), summary=derived_number(value), exact=False,
        origin=origin(gradients),
    )  # fmt: skip


def origin(entries: Sequence[MergedSite]) -> tuple[Bits, ...]:
    """The bits of sites from which another one is derived; empty if those of one are not known."""
    if not all(one.exact for one in entries):
        return ()
    return tuple(
        Bits(one.key.path, one.dtype, one.shape, one.factor, int(one.summary["fingerprint"])) for one in entries
    )


def derived_number(value: float) -> Any:
    """The summary of a finite number, or of NaN, that was computed from other summaries: it has no fingerprint."""
    summary = empty()
    summary["count"] = 1
    if math.isnan(value):
        summary["nan"] = 1
    else:
        summary["minimum"] = summary["maximum"] = summary["sum"] = summary["sketch"][0] = value
        summary["sum_of_squares"] = value * value
    return summary[()]


def only_rank(entry: MergedSite) -> int | None:
    """The only rank that has a site; None if several do. Sites derived from a whole step count as rank 0."""
    held = ranks_of(entry.parts) or {0}
    return next(iter(held)) if len(held) == 1 else None


def ranks_in(table: Mapping[Any, MergedSite]) -> set[int]:
    """The ranks that hold a part of some site."""
    found: set[int] = set()
    different: dict[int, Places] = {}
    for entry in table.values():
        if type(entry.parts) is PlacedParts:
            different[id(entry.parts.places)] = entry.parts.places
        else:
            found.update(part.rank for part in entry.parts)
    return found.union(*(places.ranks for places in different.values()))


def num_micro_steps(table: StepTable) -> int:
    """Number of micro-batches in a step."""
    most = 1
    for entry in table.values():  # of thousands of sites in each step
        parts = entry.parts
        if type(parts) is PlacedParts:
            most = max(most, parts.places.num_micro_steps)
            continue
        for part in parts:
            if part.micro_step >= most:
                most = part.micro_step + 1
    return most


def is_loss_scale(key: SiteKey) -> bool:
    """True if a key is that of the loss scale, which may differ between two runs."""
    return (key.phase, key.path) == ("loss", LOSS_SCALE)


def loss_scale(table: StepTable) -> float:
    """The loss scale of a step; 1 without one."""
    scales = [key for key in table if key[2] == LOSS_SCALE]  # of thousands of sites in each step
    found = (table[key] for key in scales if is_loss_scale(key))
    return next((number(entry.summary) for entry in found if not entry.unobserved), 0.0) or 1.0


def finding_at(
    entry: MergedSite,
    *,
    step: int,
    kind: str,
    message: str,
    evidence: Mapping[str, Any] | None = None,
    difference: float = math.inf,
    floor: float = 0.0,
    rank: int | None = None,
    micro_step: int | None = None,
    evaluation: int | None = None,
) -> Finding:
    """A finding at a site, with its place in the order of execution. The other arguments are those of `Finding`."""
    key = entry.key
    return Finding(
        step=step,
        micro_step=micro_step,
        evaluation=evaluation,
        rank=rank,
        phase=key.phase,
        stage=key.stage,
        path=key.path,
        slot=key.slot,
        call=key.call,
        order=entry.order,
        kind=kind,
        difference=difference,
        floor=floor,
        message=message,
        evidence=evidence or {},
    )
