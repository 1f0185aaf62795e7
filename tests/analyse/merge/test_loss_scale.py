"""A loss scale is divided out before anything is compared; one that is not removed is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.made_up import Seen, observed, random
from traindiff.analyse.compare.circumstances import scale_factors, scale_note
from traindiff.analyse.merge.site import MergedSite
from traindiff.analyse.merge.step_table import UNKNOWN, step_table
from traindiff.core.summary import norm

EVERYTHING = (
    "batch",
    "forward",
    "loss",
    "backward",
    "grad",
    "optimizer",
    "update",
    "param",
    "grad.micro",
    "grad.stages",
)
SCALE = 1024.0


def train(
    path: Path,
    *,
    scaled: bool = True,
    fused: bool = False,
    unscales: bool = True,
    clip: float | None = None,
    steps: int = 3,
    **settings,
) -> Path:
    """Steps of two micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer, strict=True, **settings):
        for _ in range(steps):
            inputs, wanted = torch.randn(6, 8, generator=data), torch.randn(6, 4, generator=data)
            for given, expected in zip(inputs.chunk(2), wanted.chunk(2), strict=True):
                scaler.scale(((model(given) - expected) ** 2).mean() / 2).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            if unscales:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("settings", [{}, {"observe": EVERYTHING}], ids=["default", "everything"])
def test_a_scaled_run_is_equivalent_to_one_without_a_scale(fused: bool, settings: dict, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False, fused=fused, **settings)
    scaled = train(tmp_path / "scaled", fused=fused, **settings)

    for baseline, candidate in ((plain, scaled), (scaled, plain)):
        comparison = traindiff.compare(baseline, candidate)
        assert comparison.verdict == "equivalent", str(comparison)
        assert not any(comparison.unaligned)
        assert any(note.startswith("Loss scales differ (") for note in comparison.notes)
        assert "loss_scale" not in {row.path for row in comparison.differences}


def test_a_scale_that_is_never_divided_out_is_named(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False)
    scaled = train(tmp_path / "scaled", unscales=False)

    first = traindiff.compare(plain, scaled).first_divergence

    assert first is not None
    assert (first.step, first.phase, first.stage, first.kind) == (0, "grad", "", "scale")
    assert first.message == (
        "scaler: only the candidate has one (GradScaler). All gradients are 1024 x the baseline's (= the candidate's "
        "loss scale 1024: never divided out?)."
    )


def test_stages_are_compared_whatever_a_run_did_between_them(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", scaled=False, clip=0.1, observe=EVERYTHING)
    scaled = train(tmp_path / "scaled", clip=0.1, observe=EVERYTHING)

    comparison = traindiff.compare(plain, scaled)

    assert comparison.verdict == "equivalent", str(comparison)
    assert not any(comparison.unaligned)
    stages = {row.stage for row in comparison.differences if (row.phase, row.slot) == ("grad", "grad")}
    assert stages == {"micro", "reduced", "unscaled", ""}


def test_what_is_scaled_is_divided_by_the_scale_of_its_own_micro_step() -> None:
    values, parts = random(4, 4, seed=0), []
    for micro_step, scale in enumerate((8.0, 2.0)):
        known = Seen(values=np.array(scale), about={"micro_step": micro_step, "merge": "mean"})
        parts.append(observed(("loss", "", "loss_scale", "value"), known, step=0, order=0))
        about = {"micro_step": micro_step, "merge": "sum", "scaled": True}
        parts.append(
            observed(("grad", "micro", "w", "grad"), Seen(values=values * scale, about=about), step=0, order=1)
        )

    table = step_table((seen, 0, summary) for seen, summary in parts)

    (entry,) = (entry for key, entry in table.items() if key.phase == "grad")
    assert entry.summary["sum"] == pytest.approx(2.0 * float(values.sum()), rel=1e-5)
    assert [float(norm(part.summary)) for part in entry.parts] == pytest.approx([float((values**2).sum() ** 0.5)] * 2)


def test_what_is_scaled_by_an_unknown_scale_is_unknown() -> None:
    site = ("backward", "", "fc", "output[0]")
    seen, summary = observed(site, Seen(values=random(4, 4, seed=0), about={"scaled": True}), step=0, order=0)

    (entry,) = step_table([(seen, 0, summary)]).values()

    assert entry.unobserved == UNKNOWN


def scaled_on(rank: int, micro_step: int, scales: dict[tuple[int, int], float]) -> MergedSite:
    """A gradient of ones on a rank, in a step in which ranks have these loss scales by rank and micro-step."""
    parts = []
    for (holder, number), scale in scales.items():
        known = Seen(values=np.array(scale), about={"micro_step": number, "merge": "mean"})
        parts.append((*observed(("loss", "", "loss_scale", "value"), known, step=0, order=0), holder))
    about = {"micro_step": micro_step, "merge": "sum", "scaled": True}
    parts.append(
        (*observed(("grad", "micro", "w", "grad"), Seen(values=np.ones(4), about=about), step=0, order=1), rank)
    )
    table = step_table((seen, holder, summary) for seen, summary, holder in parts)
    return next(entry for key, entry in table.items() if key.phase == "grad")


@pytest.mark.parametrize(
    ("rank", "micro_step", "scales", "scale"),
    [
        (0, 2, {(0, 0): 2.0, (0, 1): 4.0, (0, 3): 8.0}, 4.0),  # the latest before it
        (0, 1, {(0, 1): 4.0, (1, 1): 2.0}, 4.0),
        (1, 0, {(0, 0): 4.0}, 4.0),  # another rank's, where this one reports none
        (0, 0, {(0, 1): 4.0}, 4.0),
    ],
)
def test_the_scale_of_a_micro_step_is_the_latest_that_is_known(
    rank: int, micro_step: int, scales: dict[tuple[int, int], float], scale: float
) -> None:
    assert scaled_on(rank, micro_step, scales).summary["sum"] == 4.0 / scale


def test_loss_scales_are_said_where_they_differ() -> None:
    assert scale_note(8.0, 8.0) == ""
    assert scale_note(1.0, 8.0) == (
        "Loss scales differ (none in the baseline, 8 in the candidate); they are divided out."
    )
    assert scale_note(8.0, 1.0).startswith("Loss scales differ (8 in the baseline, none in the candidate)")


@pytest.mark.parametrize(("observe", "is_said"), [("param", False), ("forward", False), ("grad", True)])
def test_a_loss_scale_that_was_not_observed_is_not_none(tmp_path: Path, observe: str, is_said: bool) -> None:
    scaled = traindiff.compare(train(tmp_path / "b"), train(tmp_path / "c", observe=[observe]))
    plain = traindiff.compare(tmp_path / "b", train(tmp_path / "d", scaled=False, observe=[observe]))

    assert not [note for note in scaled.notes if note.startswith("Loss scales differ")]
    assert bool([note for note in plain.notes if note.startswith("Loss scales differ")]) == is_said


def test_what_a_scale_that_is_treated_wrongly_leaves_is_known() -> None:
    assert scale_factors(1.0, 1.0) == []
    assert scale_factors(1.0, 8.0) == [
        (8.0, "= the candidate's loss scale 8: never divided out?"),
        (1 / 8, "= 1/8, one over the candidate's loss scale: divided out without being applied, or twice?"),
    ]
    assert scale_factors(8.0, 1.0) == [
        (1 / 8, "= the baseline's loss scale 8: never divided out?"),
        (8.0, "= 1/8, one over the baseline's loss scale: divided out without being applied, or twice?"),
    ]
