"""Dropout that is active in forward passes without gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.rule import Limit, Rule

EVALUATION = "evaluation"
"""Stage of a forward pass without gradients; `record(evaluation=True)` records them."""

FEW = 256
"""Elements below which shares of zeros say little."""


class EvaluationIsCertain(Rule):
    """Dropout modules that leave out as large a share of their input in evaluation as in training.

    Active dropout sets that share to 0; inactive dropout returns its input. So it is active where the share of zeros is
    the same as in training, within 6 deviations of chance, and returns something with both signs (behind a ReLU or a
    softmax zeros are usual) that no module before it returned. Needs `record(evaluation=True)`; without it, evaluation
    is not recorded. Some draw from an active dropout on purpose (Gal and Ghahramani, 2016), so it is a warning.
    """

    name = "dropout-in-evaluation"
    finds = "Dropout is active in forward passes without gradients."
    kinds = ("dropout-in-evaluation",)
    warns = True
    tells_runs_apart = False
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_share": Limit(default=0.01, says="smallest share of zeros that is put down to dropout"),
    }

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._in_training: dict[str, float] = {}

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
        """See the class."""
        before: dict[str, set[int]] = {}
        found = []
        for key, entry in table.items():
            if key.phase != "forward" or key.stage not in ("", EVALUATION) or entry.unobserved:
                continue
            fingerprint = int(entry.summary["fingerprint"])
            earlier = before.setdefault(key.stage, set())
            if self.facts.modules.get(key.path, "").startswith("Dropout"):
                changed = fingerprint not in earlier
                if not key.stage and changed and _has_both_signs(entry):
                    self._in_training[key.path] = _share(entry)
                elif key.stage and changed and _has_both_signs(entry):
                    found.append(entry)
            earlier.add(fingerprint)
        for entry in found:
            share, usual = _share(entry), self._in_training.get(entry.key.path)
            if usual is None or not self.limit("least_share") <= share <= 1.0 - self.limit("least_share"):
                continue
            chance = math.sqrt(usual * (1.0 - usual) / int(entry.summary["count"]))
            if abs(share - usual) > 6.0 * math.sqrt(2.0) * chance:
                continue
            says = (
                f"{entry.key.path} is active in a forward pass without gradients: {share:.1%} of what it returns is 0, "
                f"as in training ({usual:.1%}). Call model.eval() before evaluating, and model.train() after it."
            )
            evidence = {"share": share, "share_in_training": usual}
            yield finding_at(entry, step=step, kind="dropout-in-evaluation", says=says, evidence=evidence)


def _share(entry: Entry) -> float:
    return int(entry.summary["zero"]) / int(entry.summary["count"])


def _has_both_signs(entry: Entry) -> bool:
    """Whether there are enough numbers below and above 0 for zeros to stand out."""
    count, negative, zero = (int(entry.summary[name]) for name in ("count", "negative", "zero"))
    present = count - zero
    return count >= FEW and present > 0 and 0.05 < negative / present < 0.95
