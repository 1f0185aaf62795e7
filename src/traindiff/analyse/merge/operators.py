"""The operators of a step, as one rank has run them: each with what it was given and what it returned."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.step_table import Entry, Key, Part
from traindiff.core.observation import OPERATOR, OPERATOR_STAGES, Observation
from traindiff.core.site import ROOT

_PATH = re.compile(r"(.*)/([^/]+)\[(\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorRun:
    """One operator, run once.

    Attributes:
        rank: Rank.
        micro_step: Micro-step.
        phase: `forward` or `backward`.
        path: As it was recorded, e.g. `encoder.fc/aten.addmm[0]`.
        module: Canonical path of the module inside which it ran, under the baseline's names.
        call: Which call of that module in the micro-step.
        name: Without its number, e.g. `aten.addmm`.
        order: Place in execution order of what was observed first of it.
        last_order: The same of what was observed last.
        inputs: What it was given, by slot.
        outputs: What it returned or wrote to, by slot.
    """

    rank: int
    micro_step: int
    phase: str
    path: str
    module: str
    call: int
    name: str
    order: int
    last_order: int
    inputs: Mapping[str, Entry]
    outputs: Mapping[str, Entry]


def is_of_operator(seen: Observation) -> bool:
    """Whether an observation is of an operator: no site of a module, and compared only inside one."""
    return seen.stage in OPERATOR_STAGES


def operator_runs(parts: Iterable[Part], rename: Rename = str) -> list[OperatorRun]:
    """The operators that ran, in execution order, without those that activation checkpointing ran a second time.

    Args:
        parts: Observations of operators, of all ranks.
        rename: Turns the run's paths into the baseline's.
    """
    by_run: dict[tuple[int, int, str, str, int], list[tuple[Observation, Any]]] = {}
    for seen, rank, summary in parts:
        if seen.stage == OPERATOR:
            by_run.setdefault((rank, seen.micro_step, seen.phase, seen.path, seen.call), []).append((seen, summary))
    found = [_operator_run(rank, observed, rename) for (rank, *_), observed in by_run.items()]
    return sorted((one for one in found if one is not None), key=lambda one: (one.rank, one.order))


def _operator_run(rank: int, observed: list[tuple[Observation, Any]], rename: Rename) -> OperatorRun | None:
    first = observed[0][0]
    match = _PATH.fullmatch(first.path)
    if match is None:
        return None
    entries = {seen.slot: _entry(seen, summary) for seen, summary in observed}
    return OperatorRun(
        rank=rank,
        micro_step=first.micro_step,
        phase=first.phase,
        path=first.path,
        module=rename("" if match[1] == ROOT else match[1]),
        call=first.call,
        name=match[2],
        order=min(seen.order for seen, _ in observed),
        last_order=max(seen.order for seen, _ in observed),
        inputs={slot: entry for slot, entry in entries.items() if slot.startswith("input")},
        outputs={slot: entry for slot, entry in entries.items() if slot.startswith("output")},
    )


def _entry(seen: Observation, summary: Any) -> Entry:
    """What one rank holds: of operators nothing is merged."""
    return Entry(
        key=Key(seen.phase, seen.stage, seen.path, seen.slot, seen.call, seen.micro_step),
        order=seen.order, dtype=seen.dtype, shape=seen.shard.shape, summary=summary, unobserved=seen.unobserved,
    )  # fmt: skip
