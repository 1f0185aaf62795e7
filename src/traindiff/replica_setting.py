"""Which replica of a training to make, as the user wrote it and as `run.json` holds it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from traindiff.errors import Problem

SEEDED = ("ulp", "reorder")
"""Kinds of replica that draw from a seed."""

KINDS = (*SEEDED, "float64")

_WRITTEN = re.compile(r"(?P<kind>[^:]*)(:(?P<seed>[0-9]{1,18}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSetting:
    """How a training is perturbed within rounding.

    Attributes:
        kind: One of `KINDS`.
        seed: Which of all such perturbations; 0 for `float64`, which has but one.
    """

    kind: str
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.kind}:{self.seed}" if self.kind in SEEDED else self.kind


def parse_replica(value: object, *, where: str) -> ReplicaSetting | Problem | None:
    """Read `"ulp:1"`, `"reorder:1"` or `"float64"`; None means no replica. Without a seed, the seed is 0."""
    if value is None or isinstance(value, ReplicaSetting):
        return value
    written = _WRITTEN.fullmatch(value) if isinstance(value, str) else None
    if written is None:
        what = f"{value!r} is not a replica."
        return Problem(where=where, what=what, fix='Write "ulp:1", "reorder:1" or "float64".')
    kind, seed = written["kind"], written["seed"]
    if kind not in KINDS:
        return Problem.unknown_name(where=where, kind="a replica", found=kind, known=KINDS)
    if seed is not None and kind not in SEEDED:
        what = f"{value!r} has a seed, but nothing of a {kind} replica is random."
        return Problem(where=where, what=what, fix=f'Write "{kind}".')
    return ReplicaSetting(kind=kind, seed=int(seed or 0))


def checked_replica(value: object, *, ranks: object, problems: list[Problem]) -> ReplicaSetting | None:
    """The replica that the user asked for; appends to `problems` what is wrong with it."""
    replica = parse_replica(value, where=f"record(replica={value!r})")
    if isinstance(replica, Problem):
        problems.append(replica)
        return None
    if replica is not None and ranks is not None:
        problems.append(
            Problem(
                where="record(replica=..., ranks=...)",
                what="would perturb the training on some ranks only, and the ranks would drift apart.",
                fix="Leave ranks out to record the replica on all of them.",
            )
        )
    return replica
