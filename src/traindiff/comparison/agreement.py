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

    Also random state, where a forward pass draws from it and ranks work on the same samples.

    The ranks that are alone are those outside of the largest group that agrees. Of two ranks that differ, which
    is wrong is not known.
    """
    for key, entry in table.items():
        if not entry.apart or not _must_agree(table, key):
            continue
        most, *others = entry.apart
        alone = sorted(rank for group in others for rank in group)
        tied = len(others[0]) == len(most)
        where = label(key.path, key.slot)
        hold = "holds" if len(alone) == 1 else "hold"
        if key.path == "rng":
            says = (
                f"{name_ranks(alone)} {hold} another random state ({key.slot}) before the forward pass than "
                f"{name_ranks(most, capital=False)}, with the same samples: dropout masks differ."
            )
        elif tied:
            says = f"{name_ranks(sorted([*most, *alone]))} hold different copies of {where}, which should be the same."
        else:
            says = f"{name_ranks(alone)} {hold} another copy of {where} than {name_ranks(most, capital=False)}."
        yield Finding(
            step=step, micro_step=None, rank=alone[0] if len(alone) == 1 and not tied else None, phase=key.phase,
            stage=key.stage, path=key.path, slot=key.slot, call=key.call, order=entry.order, kind=KIND,
            difference=float("inf"), floor=0.0, says=says,
            evidence={"ranks": [list(group) for group in entry.apart]},
        )  # fmt: skip


def _must_agree(table: Mapping[Key, Entry], key: Key) -> bool:
    """Whether copies of this on several ranks are the same in a correct run. Buffers may be statistics of its own."""
    if key.path == "rng":
        after = table.get(key._replace(stage="after"))
        return key.stage == "before" and after is not None and _draws(table[key], after)
    return key.phase == "optimizer" or (key.phase, key.slot) == ("param", "value") or key[:2] == ("grad", "")


def _draws(before: Entry, after: Entry) -> bool:
    """Whether on some rank a forward pass changed the state of the generator."""
    states = {(part.rank, part.micro_step): int(part.summary["fingerprint"]) for part in before.parts}
    return any(
        states.get((part.rank, part.micro_step)) not in (None, int(part.summary["fingerprint"])) for part in after.parts
    )
