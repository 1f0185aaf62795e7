"""An embedding that is also the head: its gradient has rows of zeros only where the head's part is lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import Array, random
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.rules.rule import RunFacts
from traindiff.analyse.rules.tying import TiedGradientsAddUp

FACTS = RunFacts(modules={"wte": "Embedding", "head": "Linear"}, tied={"head.weight": "wte.weight"})
SENT = random(3, 10, seed=1)


def gradient(zero_rows: int, *, dtype: str = "float32") -> Array:
    values = random(10, 4, seed=0, dtype=dtype)
    values[:zero_rows] = 0
    return values


def findings(gradient: Array, sent: Array = SENT, *, facts: RunFacts = FACTS, **about: Any) -> list[str]:
    table = step_table([
        part(sent, site=("backward", "", "head", "output[0]")),
        part(gradient, site=("grad", "", "wte.weight", "grad"), **about),
    ])  # fmt: skip
    return [finding.message for finding in TiedGradientsAddUp(facts).step(table, step=3)]


@pytest.mark.parametrize("zero_rows", [1, 6])
def test_rows_of_zeros_are_counted(zero_rows: int) -> None:
    assert findings(gradient(zero_rows)) == [
        "The gradient of wte.weight, which is also head.weight, lacks what head contributes: "
        f"{zero_rows} of its 10 rows are zero, and the gradient at the output of head is so nowhere."
    ]


def test_each_tie_is_judged_by_itself() -> None:
    others = {"a.weight": "b.weight", "head.weight": "wte.weight", "c.weight": "wte.weight"}

    assert len(findings(gradient(6), facts=replace(FACTS, tied=others))) == 1


def test_fewer_zeros_than_a_row_has_may_be_chance() -> None:
    values = gradient(0)
    values[0, :3] = 0

    assert findings(values) == []


def test_a_head_that_sends_zeros_or_nothing_finite_explains_rows_of_zeros() -> None:
    for place, value in ((0, 0.0), (5, np.nan), (5, np.inf)):
        sent = SENT.copy()
        sent.reshape(-1)[place] = value
        assert findings(gradient(6), sent) == []


def test_padded_labels_leave_zeros_at_whole_positions_and_hide_nothing() -> None:
    sent = SENT.copy()
    sent[1] = 0

    assert len(findings(gradient(6), sent)) == 1
    assert findings(gradient(0), sent) == []
    assert findings(gradient(6), np.zeros_like(sent)) == []  # no label at all


def test_short_dtypes_may_underflow() -> None:
    assert findings(gradient(6, dtype="float16")) == []
    assert findings(gradient(6, dtype="float64")) != []


@pytest.mark.parametrize(
    "modules",
    [
        {"wte": "Linear", "head": "Linear"},
        {"wte": "Embedding", "head": "Embedding"},
        {"wte": "LSTM", "head": "Linear"},
        {"wte": "Embedding", "head": "Conv1d"},
    ],
)
def test_of_weights_that_are_tied_otherwise_nothing_can_be_told(modules: dict[str, str]) -> None:
    assert findings(gradient(6), facts=replace(FACTS, modules=modules)) == []


def test_where_either_was_not_observed_nothing_is_said() -> None:
    assert findings(gradient(6), unobserved="sparse") == []
    assert findings(gradient(6)[0]) == []
    assert findings(gradient(6), facts=replace(FACTS, tied={"other.weight": "wte.weight"})) == []
    alone = step_table([part(gradient(6), site=("grad", "", "wte.weight", "grad"))])
    assert list(TiedGradientsAddUp(FACTS).step(alone, step=3)) == []
