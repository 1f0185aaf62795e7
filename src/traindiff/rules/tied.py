"""Whether the gradient of a tied parameter has what each of its uses contributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rounding import UNIT_ROUNDOFF
from traindiff.rules.rule import Rule
from traindiff.summary import nonfinite_count


class TiedGradientsAddUp(Rule):
    """An embedding that is also the head, and whose gradient lacks what the head contributes.

    A softmax over the vocabulary sends a gradient to every row of the head, an embedding to the rows of the tokens
    in the batch only. So rows of zeros in the gradient, where no element of the gradient at the head's output is
    zero, mean that the head's part is lost. The reverse, and weights that are tied otherwise, cannot be told from
    summaries of one run.
    """

    name = "tied-gradient"
    finds = "The gradient of an embedding that is also the head lacks the head's part."
    kinds = ("tied-gradient",)

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterable[Finding]:
        """See the class."""
        for other, path in self.facts.tied.items():
            names = [name.rpartition(".")[0] for name in (other, path)]
            heads = [name for name in names if self.facts.modules.get(name) == "Linear"]
            gradient = table.get(Key("grad", "", path, "grad", 0, 0))
            if (
                len(heads) != 1
                or not {self.facts.modules.get(name) for name in names} & {"Embedding"}
                or gradient is None
            ):
                continue
            output = table.get(Key("backward", "", heads[0], "output[0]", 0, 0))
            if output is None or output.unobserved or gradient.unobserved or len(gradient.shape) != 2:
                continue
            if not gradient.exact or int(output.summary["zero"]) or nonfinite_count(output.summary):
                continue
            zeros, width = int(gradient.summary["zero"]), gradient.shape[1]
            if zeros < width or UNIT_ROUNDOFF.get(gradient.dtype, 1.0) > UNIT_ROUNDOFF["float32"]:
                continue  # elements of short dtypes may underflow
            says = (
                f"The gradient of {path}, which is also {other}, lacks what {heads[0]} contributes: {zeros // width} "
                f"of its {gradient.shape[0]} rows are zero, and the gradient at the output of {heads[0]} is so nowhere."
            )
            evidence = {"zero_rows": zeros // width}
            yield finding_at(gradient, step=step, kind="tied-gradient", says=says, evidence=evidence)
