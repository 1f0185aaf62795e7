"""Copies agree: what several ranks hold of one tensor is the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from traindiff.comparison.ranks import name_ranks
from traindiff.comparison.step_table import Entry, Key
from traindiff.comparison.verdict import Finding
from traindiff.site import label

KIND = "ranks-disagree"


def agreement_findings(table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
    """Parameters, optimizer state and reduced gradients whose copies differ between ranks, by fingerprint.

    The ranks that are alone are those outside of the largest group that agrees. Of two ranks that differ, which
    is wrong is not known.
    """
    for key, entry in table.items():
        if not entry.apart or key.path == "rng" or not (key.phase in ("param", "optimizer") or key[:2] == ("grad", "")):
            continue
        most, *others = entry.apart
        alone = sorted(rank for group in others for rank in group)
        tied = len(others[0]) == len(most)
        where = label(key.path, key.slot)
        if tied:
            says = f"{name_ranks(sorted([*most, *alone]))} hold different copies of {where}, which should be the same."
        else:
            hold = "holds" if len(alone) == 1 else "hold"
            says = f"{name_ranks(alone)} {hold} another copy of {where} than {name_ranks(most, capital=False)}."
        yield Finding(
            step=step, micro_step=None, rank=alone[0] if len(alone) == 1 and not tied else None, phase=key.phase,
            stage=key.stage, path=key.path, slot=key.slot, call=key.call, order=entry.order, kind=KIND,
            difference=float("inf"), floor=0.0, says=says,
            evidence={"ranks": [list(group) for group in entry.apart]},
        )  # fmt: skip
