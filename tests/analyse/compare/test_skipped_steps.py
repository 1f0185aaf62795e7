"""Steps that a loss scaler left out."""

from __future__ import annotations

import numpy as np

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
