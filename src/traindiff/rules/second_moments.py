"""The moments that an optimizer of Adam's kind keeps of each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from traindiff.merging.step_table import Entry, Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """What an optimizer keeps of one parameter: means of its gradients and of their squares."""

    first: Entry
    second: Entry

    @property
    def path(self) -> str:
        """Path of the parameter."""
        return self.second.key.path

    @property
    def count(self) -> int:
        """Number of its elements."""
        return int(self.second.summary["count"])


def moments_of(table: Mapping[Key, Entry]) -> Iterator[Moments]:
    """The moments of a step that are known."""
    for key, second in table.items():
        if key.phase != "optimizer" or key.slot != "exp_avg_sq" or second.unobserved or not second.exact:
            continue
        first = table.get(key._replace(slot="exp_avg"))
        if first is not None and not first.unobserved and first.exact:
            yield Moments(first=first, second=second)
