"""Tensors keep their bits in memory until something writes to them, and products repeat themselves."""

from __future__ import annotations

from collections.abc import Iterator

from traindiff.analyse.findings import Finding, ranks_text
from traindiff.analyse.merge.placed_parts import ranks_of
from traindiff.analyse.merge.site import MergedSite, StepTable, finding_at, only_rank, ranks_in
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
    through `.data`; these change more than one bit. If a training writes to gradients so, or to parameters or a state,
    no more is said of these.

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

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step: one for each tensor."""
        for key, entry in table.items():
            if key.stage != FLIPPED or entry.unobserved or not entry.parts:
                continue
            mine, ranks = ranks_of(entry.parts), ranks_in(table)
            where = f" on {ranks_text(sorted(mine), capital=False)}" if mine != ranks else ""
            bit = None if key.slot == REPEATED else int(number(entry.parts[0].summary))
            what = (
                f"One element of what {key.path} returned{where} is another number than when the operator runs again"
                ", which gives the same bits twice."
                if bit is None
                else f"Bit {bit} of one element of {_tensor(entry)} changed in memory{where}, "
                f"{_when(table, entry)}. Nothing wrote to it."
            )
            yield finding_at(
                entry, step=step, kind=self.name, rank=only_rank(entry) if where else None,
                micro_step=entry.parts[0].micro_step, evidence={"bit": bit},
                message=f"{what} Is the hardware sound?",
            )  # fmt: skip


def _tensor(entry: MergedSite) -> str:
    match entry.key.phase:
        case "grad":
            return "the gradient"
        case "param":
            return "the parameter"
        case "optimizer":
            return f"the optimizer's {entry.key.slot}"
    return f"what {entry.key.path} {'returned' if entry.key.slot == 'output' else 'was given'}"


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
