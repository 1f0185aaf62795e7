"""Ties between the weights of an embedding and a head, and their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.rule import Contents, Rule
from traindiff.core.summary import UNIT_ROUNDOFF, nonfinite_count

EMBEDDINGS = frozenset({"Embedding"})
HEADS = frozenset({"Linear"})


class _Bits(NamedTuple):
    """Content of a weight: equal for equal weights only."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: int


class TyingStays(Rule):
    """An embedding and a head are two parameters with the same bits before the first step, and then differ.

    The rule also reports the opposite. If two parameters begin with the same bits, they were probably tied, and
    loading, moving or wrapping the model has separated them; then each learns alone. They may also be copies on
    purpose, so the rule only warns. Layers that are copies of each other (as `nn.TransformerEncoder` makes them) begin
    with the same bits too. So the rule compares only an embedding with a linear layer.
    """

    name = "tying-changed"
    finds = "Embedding and head begin as one weight and part, or the other way round."
    needs = "an embedding and a linear layer"
    warns = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return all(not kinds.isdisjoint(contents.facts.modules.values()) for kinds in (EMBEDDINGS, HEADS))

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._began: dict[tuple[str, str], bool] | None = None

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of a step."""
        if self._began is None:
            before = self._weights(table, stage="before")
            if before:
                self._began = _pairs(before)
        if not self._began:
            return
        now = _pairs(self._weights(table, stage=""))
        for pair in [pair for pair in self._began if pair in now]:
            if self._began[pair] == now[pair]:
                continue
            was_one = self._began.pop(pair)
            embedding, head = pair
            entry = table[SiteKey("param", "", head, "value")]
            message = (
                f"{head} and {embedding} hold the same numbers before the first step and part in step {step}: they are "
                "two parameters, each of which learns alone. If they should be tied, tie them after loading and "
                "wrapping."
                if was_one
                else f"{head} and {embedding} are different before the first step and hold the same numbers after step "
                f"{step}: something has tied or copied them since."
            )
            yield self.finding(entry, message, step=step, embedding=embedding, head=head)

    def _weights(self, table: StepTable, *, stage: str) -> dict[str, tuple[str, _Bits]]:
        """Weights of embeddings and linear layers by path: the class of the module, and the content."""
        found = {}
        for key, entry in sites(table, "param", stage=stage):
            kind = self.facts.modules.get(key.path.rpartition(".")[0], "")
            if key != SiteKey("param", stage, key.path, "value") or kind not in EMBEDDINGS | HEADS:
                continue
            if entry.unobserved or not entry.exact or len(entry.shape) != 2 or _is_constant(entry):
                continue
            found[key.path] = (kind, _Bits(entry.dtype, entry.shape, int(entry.summary["fingerprint"])))
        return found


def _is_constant(entry: MergedSite) -> bool:
    """True if all elements that are numbers are the same one, or none is a number: that proves no tie."""
    return float(entry.summary["minimum"]) >= float(entry.summary["maximum"])


def _pairs(weights: Mapping[str, tuple[str, _Bits]]) -> dict[tuple[str, str], bool]:
    """Embeddings and heads of one shape, and whether they are equal."""
    return {
        (embedding, head): bits == other
        for embedding, (kind, bits) in weights.items()
        if kind in EMBEDDINGS
        for head, (other_kind, other) in weights.items()
        if other_kind in HEADS and bits[:2] == other[:2]
    }


class TiedGradientsAddUp(Rule):
    """The gradient of an embedding that is also the head lacks the head's contribution.

    A softmax over the vocabulary gives every row of the head a gradient. An embedding gives one only to the rows of the
    tokens in the batch. So the head's part is lost if the gradient has rows of zeros, although no element of the
    gradient at the head's output is zero, or only whole positions are, as padded labels leave them. Summaries of one
    run do not show a lost embedding part, or faults of weights that are tied in another way.
    """

    name = "tied-gradient"
    finds = "The gradient of an embedding that is also the head lacks the head's part."
    needs = "tied weights"
    tells_runs_apart = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return bool(contents.facts.tied)

    def step(self, table: StepTable, *, step: int) -> Iterable[Finding]:
        """Findings of a step."""
        for other, path in self.facts.tied.items():
            names = [name.rpartition(".")[0] for name in (other, path)]
            heads = [name for name in names if self.facts.modules.get(name) == "Linear"]
            gradient = table.get(SiteKey("grad", "", path, "grad"))
            if (
                len(heads) != 1
                or not {self.facts.modules.get(name) for name in names} & {"Embedding"}
                or gradient is None
            ):
                continue
            output = table.get(SiteKey("backward", "", heads[0], "output[0]"))
            if output is None or output.unobserved or gradient.unobserved or len(gradient.shape) != 2:
                continue
            if not gradient.exact or nonfinite_count(output.summary) or not _reaches_every_class(output):
                continue
            zeros, width = int(gradient.summary["zero"]), gradient.shape[1]
            if zeros < width or UNIT_ROUNDOFF.get(gradient.dtype, 1.0) > UNIT_ROUNDOFF["float32"]:
                continue  # elements of short dtypes may underflow
            message = (
                f"The gradient of {path}, which is also {other}, lacks what {heads[0]} contributes: {zeros // width} "
                f"of its {gradient.shape[0]} rows are zero, and the gradient at the output of {heads[0]} is so nowhere."
            )
            yield self.finding(gradient, message, step=step, zero_rows=zeros // width)


def _reaches_every_class(output: MergedSite) -> bool:
    """True if the gradient at a head's output is zero nowhere, or at whole positions only: those of padded labels."""
    classes, zeros, count = (
        output.shape[-1] if output.shape else 0,
        int(output.summary["zero"]),
        output.summary["count"],
    )
    return not zeros or bool(classes and zeros % classes == 0 and zeros < int(count))
