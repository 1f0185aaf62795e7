"""What activation checkpointing computes again is what it was the first time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair, size_of
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import StepTable, finding_at
from traindiff.analyse.rules.rule import Contents, Rule
from traindiff.core.observation import RECOMPUTED
from traindiff.core.summary import rounding


class RecomputationRepeats(Rule):
    """Activation checkpointing computes an output again in the backward pass, and gets another one.

    Then the gradients belong to another forward pass than the loss: to other dropout masks (`preserve_rng_state=False`,
    a generator of the training's own), to statistics or a state that the first pass has changed, or to an operation
    that is not deterministic. Differences within the rounding of one operation are no finding. Modules that are called
    several times in a step are left out: they are not recomputed in the order of their calls. So are modules that a
    function of autograd calls in its own backward pass, unless its name says that it is a checkpoint: the adjoint of a
    solver gives them other inputs, and a reversible layer rounded ones.
    """

    name = "recomputed"
    finds = "Activation checkpointing computes an output again, and gets another one."
    needs = "outputs of modules under activation checkpointing"
    tells_runs_apart = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return RECOMPUTED in contents.stages

    def begin(self) -> None:
        """Nothing was told so far."""
        self._told: set[tuple[str, str]] = set()

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """A finding for each output, once in a run."""
        for pair in changed_when_recomputed(table):
            key = pair.candidate.key
            if (key.path, key.slot) in self._told:
                continue
            self._told.add((key.path, key.slot))
            message = (
                f"Activation checkpointing computes {key.path} again and gets another output: another dropout mask "
                "(preserve_rng_state=False?), or an operation that is not deterministic? Its gradients do not belong "
                "to this loss."
            )
            yield finding_at(
                pair.candidate, step=step, kind=self.name, message=message,
                difference=size_of(pair), floor=rounding(pair.candidate.dtype),
            )  # fmt: skip


def changed_when_recomputed(table: StepTable) -> Iterator[Pair]:
    """Outputs that differ when they are recomputed, paired with the first computation."""
    calls = Counter((key.path, key.slot) for key, _ in sites(table, "forward", stage=""))
    for key, entry in sites(table, stage=RECOMPUTED):
        first = table.get(key._replace(stage=""))
        if first is None or calls[key.path, key.slot] != 1:
            continue
        if first.unobserved or entry.unobserved:
            continue
        pair = Pair(baseline=first, candidate=entry)
        if size_of(pair) > rounding(entry.dtype):
            yield pair
