"""Findings that an engine's own settings explain."""

from __future__ import annotations

import math
from typing import Any

import pytest

from traindiff.analyse.compare.circumstances import coefficient_error
from traindiff.analyse.compare.explanations import explained
from traindiff.analyse.findings import Finding

ENGINE = {"gradient_clipping": 1.0, "optimizer": "AdamW", "decoupled_weight_decay": True, "asked_for": "adam"}


def finding(kind: str, slot: str, **evidence: Any) -> Finding:
    return Finding(
        step=0, micro_step=None, rank=None, phase="optimizer", stage="", path="embed.weight", slot=slot, call=0,
        order=0, kind=kind, difference=math.inf, floor=0.0, message="They differ.", evidence=evidence,
    )  # fmt: skip


def test_clipping_by_default_is_explained() -> None:
    found = explained(finding("clipping", "max_norm", run="candidate", limit=1.0), {}, {"engine": ENGINE})

    assert found.message == (
        'They differ. DeepSpeed does so by default since 0.19.3: write "gradient_clipping": 0.0 in its configuration, '
        "or clip in both runs."
    )


@pytest.mark.parametrize(
    "given",
    [
        finding("clipping", "max_norm", run="candidate", limit=0.5),  # chosen by somebody
        finding("clipping", "max_norm", run="baseline", limit=1.0),  # of the run without an engine
        finding("scale", "grad"),
        finding("hyper-parameter", "lr"),
    ],
)
def test_other_findings_are_left_as_they_are(given: Finding) -> None:
    assert explained(given, {}, {"engine": ENGINE}) is given
    assert explained(given, {}, {"engine": None}) is given


def test_adamw_in_place_of_adam_is_explained() -> None:
    given = finding("hyper-parameter", "decoupled_weight_decay")

    assert explained(given, {}, {"engine": ENGINE}).message == (
        "They differ. The candidate's configuration asks DeepSpeed for Adam, and it makes AdamW of that (AdamW): "
        'write "adam_w_mode": false for Adam.'
    )
    assert explained(given, {}, {"engine": {**ENGINE, "asked_for": "adamw"}}) is given


def test_optimizers_that_compute_in_float32_have_an_error_in_their_coefficients() -> None:
    assert coefficient_error([{"optimizers": [{"type": "AdamW"}]}, {}]) == 0.0
    fused = [{"optimizers": [{"type": "AdamW", "settings_in_float32": True}]}]
    assert coefficient_error([{}, *fused]) == coefficient_error([{"optimizers": [{"type": "FusedAdam"}]}])
    error = coefficient_error([{"optimizers": [{"type": "FusedAdam"}]}])
    assert 1.3e-5 < error < 1e-4  # 1 - 0.999 in float32 is off by 1.3e-5
