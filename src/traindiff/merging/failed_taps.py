"""What traindiff itself failed to observe: unknown from there on, and neither absent nor equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from traindiff.findings.sentences import ranks_text
from traindiff.merging.step_table import Entry, Key
from traindiff.observation import ITSELF, TAP_FAILED
from traindiff.tap_registry import EVERYTHING, LOSES


class _Fault(NamedTuple):
    tap: str
    step: int
    says: str


@dataclass(slots=True)
class FailedTaps:
    """Collects what has failed in a run, step by step.

    Attributes:
        ranks: By what failed, when and why: on which ranks.
    """

    ranks: dict[_Fault, list[int]] = field(default_factory=dict)

    def see(self, table: Mapping[Key, Entry], *, step: int) -> None:
        """Note what failed in a step."""
        for key, entry in table.items():
            if _is_fault(key, entry):
                fault = _Fault(key.slot, step, entry.unobserved)
                self.ranks.setdefault(fault, []).extend(part.rank for part in entry.parts)

    @property
    def lost(self) -> tuple[tuple[str, str | None], ...]:
        """Phases and stages that are not known any more."""
        return tuple({lost: None for fault in self.ranks for lost in LOSES.get(fault.tap, EVERYTHING)})

    def notes(self) -> list[str]:
        """What failed, one sentence each."""
        return [
            f"On {ranks_text(sorted({*ranks}), capital=False)}, {fault.says}. What it would have seen from step "
            f"{fault.step} on is unknown."
            for fault, ranks in self.ranks.items()
        ]


def without_lost(table: Mapping[Key, Entry], lost: Iterable[tuple[str, str | None]]) -> dict[Key, Entry]:
    """The table of a step without what a tap failed to observe, in this run or in the one it is compared with."""
    gone = tuple(lost)
    return {key: entry for key, entry in table.items() if not (_is_fault(key, entry) or _is_lost(key, gone))}


def _is_fault(key: Key, entry: Entry) -> bool:
    return key.path == ITSELF and entry.unobserved.startswith(TAP_FAILED.format(tap=key.slot))


def _is_lost(key: Key, lost: Iterable[tuple[str, str | None]]) -> bool:
    return any(phase in ("", key.phase) and stage in (None, key.stage) for phase, stage in lost)
