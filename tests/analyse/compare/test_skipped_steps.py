"""Steps that a loss scaler left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.made_up import Compared, Seen, Step


def _skipping(step: int, sites: Step) -> None:
    if step == 1:
        rest = {site: sites.pop(site) for site in list(sites) if site[0] in ("optimizer", "param")}
        sites["optimizer", "", "optimizer", "skipped"] = Seen(values=np.array(1.0))
        sites.update(rest)


def test_a_step_that_only_one_run_skips_is_a_finding(compared: Compared) -> None:
    candidate, baseline = compared(_skipping), compared(baseline_edit=_skipping)

    for comparison, run in ((candidate, "candidate"), (baseline, "baseline")):
        first = comparison.first_divergence
        assert first is not None
        assert (comparison.verdict, first.step, first.kind) == ("diverged", 1, "skipped")
        assert first.message == (
            f"The {run}'s loss scaler leaves out this step of optimizer, because a gradient is not finite; the other "
            "run takes it."
        )


def test_a_step_that_both_skip_is_none(compared: Compared) -> None:
    assert compared(_skipping, baseline_edit=_skipping).verdict == "identical"


def scaled(path: Path, *, fused: bool, overflows: bool = True) -> Path:
    """Five steps under a loss scaler; in the third, the loss overflows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with traindiff.record(path, model, optimizer):
        for step in range(5):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            loss = model(x).square().mean() * (1e38 if overflows and step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("fused", [(False, True), (True, False)])
def test_a_fused_optimizer_that_leaves_the_step_out_itself_does_not_take_it(
    fused: tuple[bool, bool], tmp_path: Path
) -> None:
    found = traindiff.compare(scaled(tmp_path / "b", fused=fused[0]), scaled(tmp_path / "c", fused=fused[1]))

    assert (found.verdict, found.findings) == ("equivalent", ())


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_without_an_overflow_is_taken(fused: bool, tmp_path: Path) -> None:
    baseline = scaled(tmp_path / "b", fused=False)
    found = traindiff.compare(baseline, scaled(tmp_path / "c", fused=fused, overflows=False))

    assert found.verdict == "diverged"
    assert "skipped" in {one.kind for one in found.findings}
    assert all("are labels shifted" not in one.message for one in found.findings)
