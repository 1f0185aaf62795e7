"""Embedding and head that begin as one weight and part, or the other way round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from traindiff.findings import Finding
from traindiff.merging.finding_at import finding_at
from traindiff.merging.step_table import Entry, Key
from traindiff.rules.rule import Rule

EMBEDDINGS = frozenset({"Embedding"})
HEADS = frozenset({"Linear"})


class _Bits(NamedTuple):
    """What a weight holds: equal for equal weights only."""

    dtype: str
    shape: tuple[int, ...]
    fingerprint: int


class TyingStays(Rule):
    """An embedding and a head that are two parameters with the same bits before the first step, and then are not.

    Or the other way round. Two parameters that begin as one are what is left of a tie that loading, moving or wrapping
    the model has cut; each of them then learns alone. They may also be copies on purpose, so it is a warning. Layers
    that are copies of each other (as `nn.TransformerEncoder` makes them) begin with the same bits too, so only an
    embedding and a linear layer are compared.
    """

    name = "tying-changed"
    finds = "Embedding and head begin as one weight and part, or the other way round."
    kinds = ("tying-changed",)
    warns = True
    tells_runs_apart = False

    def begin(self) -> None:
        """See `Rule.begin`."""
        self._began: dict[tuple[str, str], bool] | None = None

    def step(self, table: Mapping[Key, Entry], *, step: int) -> Iterator[Finding]:
        """See the class."""
        if self._began is None:
            before = self._weights(table, stage="before")
            if before:
                self._began = _pairs(before)
        if not self._began:
            return
        now = _pairs(self._weights(table, stage=""))
        for pair in self._began.keys() & now.keys():
            if self._began[pair] == now[pair]:
                continue
            was_one = self._began.pop(pair)
            embedding, head = pair
            entry = table[Key("param", "", head, "value", 0, 0)]
            says = (
                f"{head} and {embedding} hold the same numbers before the first step and part in step {step}: they are "
                "two parameters, each of which learns alone. If they should be tied, tie them after loading and "
                "wrapping."
                if was_one
                else f"{head} and {embedding} are different before the first step and hold the same numbers after step "
                f"{step}: something has tied or copied them since."
            )
            evidence = {"embedding": embedding, "head": head}
            yield finding_at(entry, step=step, kind="tying-changed", says=says, evidence=evidence)

    def _weights(self, table: Mapping[Key, Entry], *, stage: str) -> dict[str, tuple[str, _Bits]]:
        """By path, the class of the module of each weight of an embedding or a linear layer, and what it holds."""
        found = {}
        for key, entry in table.items():
            kind = self.facts.modules.get(key.path.rpartition(".")[0], "")
            if key != Key("param", stage, key.path, "value", 0, 0) or kind not in EMBEDDINGS | HEADS:
                continue
            if entry.unobserved or not entry.exact or len(entry.shape) != 2 or _is_constant(entry):
                continue
            found[key.path] = (kind, _Bits(entry.dtype, entry.shape, int(entry.summary["fingerprint"])))
        return found


def _is_constant(entry: Entry) -> bool:
    return float(entry.summary["minimum"]) == float(entry.summary["maximum"])


def _pairs(weights: Mapping[str, tuple[str, _Bits]]) -> dict[tuple[str, str], bool]:
    """Embeddings and heads of one shape, and whether they hold the same."""
    return {
        (embedding, head): bits == other
        for embedding, (kind, bits) in weights.items()
        if kind in EMBEDDINGS
        for head, (other_kind, other) in weights.items()
        if other_kind in HEADS and bits[:2] == other[:2]
    }
