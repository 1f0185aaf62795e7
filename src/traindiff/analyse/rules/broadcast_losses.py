"""Losses that compare each output with the targets of all samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, StepTable
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule
from traindiff.core.observation import BROADCAST
from traindiff.core.summary import number


class LossesPairSamples(RepeatedRule):
    """The loss is computed from a tensor of N x N, where the model returns one number for each of N samples.

    Outputs of the shape (N, 1) and targets of the shape (N,) are broadcast to (N, N): each output is compared with the
    targets of all samples, and the model learns their mean. It is asked that the model returns (N, 1) or (N,), that
    nothing but operators of losses lies between this output and the tensor of N x N, and that what the outputs are
    combined with has no gradient. A loss over all pairs of samples looks the same if it is written like that, so the
    rule only warns.
    """

    name = "broadcast-loss"
    finds = "A loss compares each output of the model with the targets of all samples, since shapes were broadcast."
    needs = "a loss on which backward() is called"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=1, message="steps in a row in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return any(key.phase == "loss" and key.slot == "backward" for key in contents.table)

    def _wrong(self, table: StepTable) -> Found | None:
        marks = [entry for _, entry in sites(table, stage=BROADCAST) if not entry.unobserved]
        shapes = {
            part.shard.shape for key, entry in sites(table, "forward", stage="") if not key.path for part in entry.parts
        }
        found: Found = {}
        for mark in marks:
            samples = int(max(number(part.summary) for part in mark.parts))
            shape = (samples, 1) if mark.key.slot == "column" else (samples,)
            if shape in shapes:
                found[mark.key.call] = _loss(table, mark), {"samples": samples, "shape": list(shape)}
        return found

    def _message(self, row: Repeated) -> str:
        samples, shape = row.numbers["samples"], tuple(row.numbers["shape"])
        other = (samples,) if len(shape) == 2 else (samples, 1)
        return (
            f"The loss compares each of {samples} outputs with {samples} numbers: the model returns the shape {shape}, "
            f"and with a tensor of the shape {other}, that is broadcast to {(samples, samples)}. If each output has a "
            "target of its own, give both the same shape."
        )


def _loss(table: StepTable, mark: MergedSite) -> MergedSite:
    """The loss that a mark is about; the mark, if it was not recorded."""
    key = mark.key._replace(phase="loss", stage="", path="loss", slot="backward")
    return table.get(key, mark)
