"""Copies agree: what several ranks hold of one tensor is the same on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from traindiff.findings import Finding
from traindiff.findings.sentences import ranks_text
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.rule import Rule
from traindiff.site import label

KIND = "ranks-disagree"


class CopiesAgree(Rule):
    """Parameters, optimizer state and reduced gradients whose copies differ between ranks, by fingerprint.

    Also random state, where a forward pass draws from it and ranks work on the same samples.

    The ranks that are alone are those outside of the largest group that agrees. Of two ranks that differ, which
    is wrong is not known.
    """

    name = "ranks-disagree"
    finds = "A rank holds another copy of a parameter, a reduced gradient or optimizer state than the others."
    kinds = ("ranks-disagree",)

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
        """See the class."""
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
                    f"{ranks_text(alone)} {hold} another random state ({key.slot}) before the forward pass than "
                    f"{ranks_text(most, capital=False)}, with the same samples: dropout masks differ."
                )
            elif tied:
                says = (
                    f"{ranks_text(sorted([*most, *alone]))} hold different copies of {where}, which should be the same."
                )
            else:
                says = f"{ranks_text(alone)} {hold} another copy of {where} than {ranks_text(most, capital=False)}."
            rank = alone[0] if len(alone) == 1 and not tied else None
            evidence = {"ranks": [list(group) for group in entry.apart]}
            yield finding_at(entry, step=step, kind=KIND, says=says, rank=rank, evidence=evidence)


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
