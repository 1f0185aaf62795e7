"""Tensors keep their bits in memory until something writes to them, and products repeat themselves."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from traindiff.analyse.findings import Finding, ranks_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.placed_parts import ranks_of
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable, finding_at, only_rank, ranks_in
from traindiff.analyse.rules.rule import Contents, Rule
from traindiff.core.observation import EDITED, FLIPPED, REPEATED, WITNESS
from traindiff.core.summary import number


class TensorsKeepTheirBits(Rule):
    """One element of a tensor is not what was computed: a bit changed in memory, or a product came out otherwise once.

    With `observe="witness"`, gradients of parameters are marked after each backward pass, and looked at before
    something else adds to them, reads or changes them; parameters and the optimizer's state are marked after each step,
    and looked at before the next one reads or changes them. (Parameters are also looked at before the next forward
    pass, without the witness, too.) With `observe="products"`, so is what operators return and read, forward and
    backward. This needs a tensor on the CPU with at least 16 elements that are not 0. torch counts writes, except those
    through `.data`. If a training writes to gradients so, they are no longer looked at.

    A bit of a parameter, or of a state, is a warning at the end of the run, since a single write through `.data` may
    change just one bit of one element. If there is a second one in the run, or a wider change that torch did not count,
    the training writes so itself, and nothing is said.

    With `observe="products"`, each product on the CPU also runs a second time. If one element differs, and no other,
    by at least 16 roundings, it runs a third time, which must repeat the second one to the bit.
    """

    name = "bit-flip"
    finds = "A bit of a tensor changed in memory, or one element of a product came out otherwise once."
    needs = 'marks of tensors, which record(observe="witness") or "products" makes'
    tells_runs_apart = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return bool(contents.products) or not contents.stages.isdisjoint((WITNESS, FLIPPED))

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._perhaps: dict[str, list[Finding]] = {}  # by what it is about: parameters, or a slot of the state
        self._written: set[str] = set()  # the same: the training writes to these in ways that torch does not count
        self._left: dict[SiteKey, NDArray[np.float64]] = {}  # sketches of parameters and states after the latest step

    def is_warning(self, finding: Finding) -> bool:
        """True of what the training may have written itself."""
        return finding.phase in _OF_OPTIMIZERS

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step: one for each tensor."""
        for finding in self._found(table, step=step):
            if finding.phase in _OF_OPTIMIZERS:
                self._perhaps.setdefault(finding.slot, []).append(finding)
            else:
                yield finding
        self._written |= {key.slot for key, _ in sites(table, stage=EDITED) if not self._is_of_one_element(table, key)}
        for key, entry in sites(table, *_OF_OPTIMIZERS, stage=""):
            if not key.group and not entry.unobserved:
                self._left[key] = np.array(entry.summary["sketch"])  # a copy

    def end(self) -> Iterator[Finding]:
        """Bits of parameters and states, of which there is one in the run, and no wider change."""
        for slot, found in self._perhaps.items():
            if len(found) == 1 and slot not in self._written:
                yield found[0]

    def _is_of_one_element(self, table: StepTable, edited: SiteKey) -> bool:
        """True if one number of the sketch alone is another than the latest step left, and a bit is known."""
        left, entry = self._left.get(edited._replace(stage="")), table[edited]
        if edited._replace(stage=FLIPPED) not in table or entry.unobserved:
            return False
        return left is None or np.count_nonzero(left != entry.summary["sketch"]) == 1

    def _found(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        for key, entry in sites(table, stage=FLIPPED):
            if entry.unobserved or not entry.parts:
                continue
            mine, ranks = ranks_of(entry.parts), ranks_in(table)
            where = f" on {ranks_text(sorted(mine), capital=False)}" if mine != ranks else ""
            bit = None if key.slot == REPEATED else int(number(entry.parts[0].summary))
            what = (
                f"One element of what {key.path} returned{where} is another number than when the operator runs again"
                ", which gives the same bits twice."
                if bit is None
                else f"Bit {bit} of one element of {_tensor(entry)} changed in memory{where}, "
                f"{_when(table, entry)}. {_unwritten(entry)}."
            )
            yield finding_at(
                entry, step=step, kind=self.name, rank=only_rank(entry) if where else None,
                micro_step=entry.parts[0].micro_step, evidence={"bit": bit},
                message=f"{what} {_ASKED if key.phase in _OF_OPTIMIZERS else 'Is the hardware sound?'}",
            )  # fmt: skip


_OF_OPTIMIZERS = ("param", "optimizer")
_ASKED = "Is the hardware sound, or did the training write to this element through .data?"


def _tensor(entry: MergedSite) -> str:
    match entry.key.phase:
        case "grad":
            return "the gradient"
        case "param":
            return "the parameter"
        case "optimizer":
            return f"the optimizer's {entry.key.slot}"
    return f"what {entry.key.path} {'returned' if entry.key.slot == 'output' else 'was given'}"


def _unwritten(entry: MergedSite) -> str:
    return "torch counted no write to it" if entry.key.phase in _OF_OPTIMIZERS else "Nothing wrote to it"


def _when(table: StepTable, entry: MergedSite) -> str:
    match entry.key.phase:
        case "grad":
            return "after the backward pass and before anything read the gradient"
        case "param" if entry.key._replace(stage=EDITED) in table:
            return "after the optimizer's step before and before the forward pass"
        case "param":
            return "after the forward pass began and before the optimizer's step"
        case "optimizer":
            return "after the optimizer's step before and before this one"
    return "before the next operator read it"
