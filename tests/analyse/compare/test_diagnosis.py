"""What a difference looks like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.made_up import Array, Compared, Edit, Step, at, plain_step, random, summary_of
from traindiff.analyse.compare.case import Case, Diagnosis
from traindiff.analyse.compare.diagnosis import diagnose
from traindiff.analyse.compare.factors import clipping_left_out, factor_meaning
from traindiff.analyse.merge.distance import best_fit
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.core.summary import add, distance, norm


def entry(values: Array, *, phase: str = "grad", slot: str = "grad", **about: Any) -> MergedSite:
    key = SiteKey(phase, "", "fc.weight", slot)
    return MergedSite(
        key=key, order=0, dtype=values.dtype.name, shape=values.shape, summary=summary_of(values), **about
    )


def look(
    baseline: Array, candidate: Array, *, floor: float = 1e-6, phase: str = "grad", slot: str = "grad", **more: Any
) -> Diagnosis:
    left, right = entry(baseline, phase=phase, slot=slot), entry(candidate, phase=phase, slot=slot)
    size = float(norm(left.summary))
    apart = float(distance(left.summary, right.summary)) / size if size else float("inf")
    return diagnose(Case(baseline=left, candidate=right, difference=apart, floor=floor, **more))


X = random(32, 40, seed=0)
NOISE = random(32, 40, seed=1)


@pytest.mark.parametrize("factor", [2.0, 0.5, 8.0, 1.01, 3.7])
def test_a_factor(factor: float) -> None:
    found = look(X, X * np.float32(factor))

    assert found.kind == "scale"
    assert found.evidence["factor"] == pytest.approx(factor, rel=1e-5)


def test_a_factor_in_words() -> None:
    assert look(X, X * 2).message == "The candidate's is 2 x the baseline's."
    assert look(X, X / 4).message == "The candidate's is 0.25 x the baseline's (= 1/4)."
    assert look(X, X / 4, micro_steps=4).message == (
        "The candidate's is 0.25 x the baseline's (= 1/4, one over its micro-batches: divided once too often?)."
    )
    assert look(X, X * 4, micro_steps=4).message == (
        "The candidate's is 4 x the baseline's (= its 4 micro-batches: summed instead of averaged?)."
    )


@pytest.mark.parametrize(
    ("factor", "meaning"), [(0.0, ""), (1.0, ""), (0.995, ""), (0.7, ""), (1 / 3, " (= 1/3)"), (16.0, "")]
)
def test_only_telling_factors_are_read(factor: float, meaning: str) -> None:
    assert factor_meaning(factor, 1) == meaning


@pytest.mark.parametrize(
    ("factor", "meaning"),
    [
        (2.0, " (= world size 2 and its 2 micro-batches: summed over one of them, not averaged?)"),
        (0.5, " (= 1/2, one over the world size and over its micro-batches: divided once too often?)"),
    ],
)
def test_a_factor_that_is_both_is_said_to_be_both(factor: float, meaning: str) -> None:
    assert factor_meaning(factor, 2, 2) == meaning


@pytest.mark.parametrize(
    ("factor", "meaning"),
    [
        (4.0, " (= world size 4: summed over ranks instead of averaged?)"),
        (0.25, " (= 1/4, one over the world size: averaged once too often?)"),
        (-4.0, " (= world size 4: summed over ranks instead of averaged?)"),
        (2.0, " (= its 2 micro-batches: summed instead of averaged?)"),
        (0.5, " (= 1/2, one over its micro-batches: divided once too often?)"),
        (0.1, " (= 1/10)"),
        (8.0, ""),
    ],
)
def test_a_factor_of_ranks_is_told_from_one_of_micro_batches(factor: float, meaning: str) -> None:
    assert factor_meaning(factor, 2, 4) == meaning


@pytest.mark.parametrize(("factor", "known"), [(3.0, True), (3.02, True), (2.98, True), (3.04, False), (-3.0, False)])
def test_a_factor_of_which_something_is_known_is_read_so(factor: float, known: bool) -> None:
    found = factor_meaning(factor, 1, known=[(7.0, "= something else"), (3.0, "= what it is")])

    assert found == (" (= what it is)" if known else "")


def test_a_flipped_sign() -> None:
    assert look(X, -X).kind == "sign"


def test_a_factor_with_a_sign_is_a_factor() -> None:
    assert look(X, X * -2).evidence["factor"] == pytest.approx(-2)


def test_all_zero() -> None:
    assert look(X, X * 0).message == "The candidate's is all zero; the baseline's is not."
    assert look(X * 0, X).message == "The baseline's is all zero; the candidate's is not."


def test_an_update_of_zero() -> None:
    assert look(X, X * 0, phase="update", slot="update").kind == "never-updated"


def test_an_offset() -> None:
    found = look(X, X + np.float32(0.25))

    assert found.kind == "offset"
    assert found.evidence["offset"] == pytest.approx(0.25, rel=1e-4)
    assert found.message == "Every element is about +0.25 off."


def test_a_permutation() -> None:
    assert look(X, X[::-1]).message == "The candidate holds the same values in another order."


def test_a_row() -> None:
    candidate = X.copy()
    candidate[9] *= 3

    assert look(X, candidate).message == "The difference is in rows 8 to 9 (of 32) only."


def test_a_range_of_columns() -> None:
    wide = random(8, 128, seed=0)
    candidate = wide.copy()
    candidate[:, 70] *= 5

    assert look(wide, candidate).message == "The difference is in columns 64 to 79 (of 128) only."


def test_a_position_of_an_activation() -> None:
    values = random(4, 32, 8, seed=0)
    candidate = values.copy()
    candidate[:, 3] *= 5

    # A batched activation has its rows along axis 1.
    found = _localized_activation(values, candidate)
    assert found.message == "The difference is in rows 2 to 3 of axis 1 (of 32) only."


def _localized_activation(baseline: Array, candidate: Array) -> Diagnosis:
    from traindiff.core.shards import Shard

    shard = Shard.of_batch(baseline.shape, first=0)
    key = SiteKey("forward", "", "fc", "output[0]")
    left, right = (
        MergedSite(
            key=key, order=0, dtype="float32", shape=values.shape, batched=True, summary=summary_of(values, shard)
        )
        for values in (baseline, candidate)
    )
    return diagnose(Case(baseline=left, candidate=right, difference=1.0, floor=1e-6))


def test_a_channel_of_few_is_named_although_samples_share_buckets() -> None:
    values = random(4, 8, 6, 6, seed=0)
    candidate = values.copy()
    candidate[:, 3] *= 5
    found = _localized_activation(values, candidate)
    assert found.message == "The difference is in row 3 of axis 1 (of 8) only."
    uneven = random(4, 24, 6, seed=0)
    candidate = uneven.copy()
    candidate[1] *= 5
    assert _localized_activation(uneven, candidate).kind == "value"


def rounded(values: Array, dtype: str) -> Array:
    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    return ((values.view(np.uint32) + 0x8000) & 0xFFFF0000).view(np.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_shorter_dtype_inside_is_told_by_the_size_of_its_rounding(dtype: str) -> None:
    found = look(X, rounded(X, dtype))

    assert (found.kind, found.evidence["dtype"]) == ("precision", dtype)
    assert f"is as small as rounding to {dtype} would make it: a shorter dtype inside" in found.message


def test_values_that_are_not_finite_are_counted() -> None:
    candidate = X.copy()
    candidate[0, :2] = np.nan
    candidate[1, 0] = np.inf

    assert look(X, candidate).message == (
        "The candidate holds 2 NaN where the baseline has 0, 1 +inf where the baseline has 0, of 1280 elements."
    )


def test_values_that_are_not_finite_elsewhere() -> None:
    baseline, candidate = X.copy(), X.copy()
    baseline[0, 0] = candidate[0, 1] = np.nan

    assert look(baseline, candidate).message == "NaN or infinities stand at other places than in the baseline."


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (
            (1.0, 0.0, 1.0),
            "The optimizer's gradient lacks what micro-step 1 of 3 contributed; it is the sum of the other 2.",
        ),
        ((1.0, 1.0, 2.0), "The optimizer's gradient holds what micro-step 2 of 3 contributed twice; the other 2 once."),
        ((0.0, 1.0), "The optimizer's gradient lacks what micro-step 0 of 2 contributed; it is that of the other one."),
        ((1.0, 2.0), "The optimizer's gradient holds what micro-step 1 of 2 contributed twice; the other one once."),
        (
            (0.5, 1.0, 1.0),
            "The optimizer's gradient holds what micro-step 0 of 3 contributed 0.5 times; the other 2 once.",
        ),
        (
            (1.0, 0.0, 1.0, 0.0, 1.0),
            "The optimizer's gradient lacks what micro-steps 1 and 3 of 5 contributed; it is the sum of the other 3.",
        ),
        (
            (2.0, 1.0, 1.0, 0.0, 1.0),
            "The optimizer's gradient holds what micro-step 0 of 5 contributed twice, lacks what micro-step 3 "
            "contributed; the other 3 once.",
        ),
    ],
)
def test_a_micro_batch_that_is_lost_doubled_or_scaled(factors: tuple[float, ...], message: str) -> None:
    parts = [random(32, 40, seed=10 + number) for number in range(len(factors))]
    baseline = np.sum(parts, axis=0)
    candidate = np.sum([part * np.float32(factor) for part, factor in zip(parts, factors, strict=True)], axis=0)
    contributions = {(number, 0): summary_of(part) for number, part in enumerate(parts)}

    found = look(baseline, candidate, micro_steps=len(factors), contributions=contributions)

    assert found.kind == "lost-contribution"
    assert found.message == message


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (
            [(1, 0)],
            "lacks what rank 0 in micro-step 1 contributed; it is the sum of the other 5 of 6 contributions of all "
            "ranks.",
        ),
        (
            [(0, 1), (1, 0)],
            "lacks what rank 1 in micro-step 0 and rank 0 in micro-step 1 contributed; it is the sum of the other 4 of "
            "6 contributions of all ranks.",
        ),
        ([(0, 0), (0, 1)], "lacks what micro-step 0 of 3 contributed; it is the sum of the other 2."),
    ],
)
def test_what_one_rank_brought_in_a_micro_step_may_be_lost_alone(lost: list[tuple[int, int]], message: str) -> None:
    parts = {(step, rank): random(32, 40, seed=2 * step + rank) for step in range(3) for rank in range(2)}
    baseline = np.sum(list(parts.values()), axis=0)
    candidate = np.sum([part for place, part in parts.items() if place not in lost], axis=0)

    found = look(
        baseline, candidate, micro_steps=3, contributions={place: summary_of(part) for place, part in parts.items()}
    )

    assert found.message == f"The optimizer's gradient {message}"
    assert found.evidence["micro_step"] == lost[0][0]
    assert found.evidence.get("rank") == (lost[0][1] if message.startswith("lacks what rank") else None)


def test_more_than_half_of_the_contributions_are_not_all_odd() -> None:
    parts = [random(32, 40, seed=10 + number) for number in range(3)]
    contributions = {(number, 0): summary_of(one) for number, one in enumerate(parts)}

    found = look(np.sum(parts, axis=0), parts[0] + 3 * parts[1] + 7 * parts[2], contributions=contributions)

    assert found.kind == "value"


def test_a_factor_next_to_one_is_told_from_one() -> None:
    assert (
        look(np.float32(2.0), np.float32(2.0 + 1e-6), floor=0.0).message
        == "The candidate's is (1 + 4.8e-07) x the baseline's."
    )


def test_an_optimizers_count_of_steps() -> None:
    assert look(np.array(4.0), np.array(1.0), phase="optimizer", slot="step").message == (
        "The candidate's optimizer is at its step 1 for this parameter, the baseline's at its step 4. "
        "Was its state lost, or not loaded, at a resume?"
    )


def test_only_a_count_of_steps_is_read_as_one() -> None:
    assert look(X, X + NOISE, phase="optimizer", slot="exp_avg").kind == "value"
    assert look(X, X + NOISE, phase="forward", slot="step").kind == "value"


def test_another_activation_function_is_no_offset() -> None:
    gelu = X * (1 + np.tanh(0.8 * (X + 0.0447 * X**3))) / 2

    assert look(np.maximum(X, 0), gelu.astype(np.float32)).kind == "zeros"
    assert look(np.tanh(X), gelu.astype(np.float32)).kind == "value"


def test_none_of_these() -> None:
    found = look(X, X + NOISE)

    assert found.kind == "value"
    assert found.message.startswith("The values differ by ")


def test_noise_is_not_a_factor() -> None:
    assert look(X, X + NOISE * np.float32(0.01), floor=1e-6).message == (
        "The values differ by 0.011 of the baseline's size (relative L2)."
    )


def test_the_best_fit_of_zeros_is_defined() -> None:
    assert best_fit(entry(X * 0), entry(X)) == (0.0, 1.0)
    assert best_fit(entry(X), entry(X * 0)) == (0.0, 0.0)


def test_sums_of_observations_are_fitted_by_their_sketches() -> None:
    left, right = entry(X, exact=False), entry(X, exact=False)
    doubled = MergedSite(
        key=right.key, order=0, dtype="float32", shape=X.shape, summary=add([right.summary], [2.0]), exact=False
    )

    assert best_fit(left, doubled)[0] == pytest.approx(2.0)


def test_what_the_baseline_had_in_the_step_before_is_one_step_late(compared: Compared) -> None:
    site = ("grad", "", "fc.weight", "grad")
    before = plain_step(0)[site].values

    first = compared(at(site, lambda x: before.copy(), step=1)).first_divergence

    assert first is not None
    assert (first.step, first.kind) == (1, "late")
    assert first.message == "The candidate's is what the baseline has in the step before: one step late?"


def test_a_setting_of_the_step_before_is_one_step_late(compared: Compared) -> None:
    site = ("optimizer", "", "optimizer.groups[0]", "lr")

    def warming_up(late: int) -> Edit:
        def edit(step: int, sites: Step) -> None:
            sites[site].values = np.array(0.1 * (1 + max(0, step - late)))

        return edit

    first = compared(warming_up(1), baseline_edit=warming_up(0)).first_divergence

    assert first is not None
    assert (first.step, first.kind) == (1, "hyper-parameter")
    assert "one step late?" in first.message


def test_a_setting_of_an_earlier_recorded_step_is_not_one_step_late(tmp_path: Path) -> None:
    """Steps 0, 2 and 4 are recorded; in step 4, the candidate has what the baseline had in step 2."""
    for name, late in (("b", 0), ("c", 2)):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters())
        with traindiff.record(tmp_path / name, model, optimizer, every=2):
            for step in range(5):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step - (late if step > 2 else 0))
                model(torch.ones(2, 4)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    changed = [
        one for one in traindiff.compare(tmp_path / "b", tmp_path / "c").findings if one.kind == "hyper-parameter"
    ]

    assert [one.step for one in changed] == [4]
    assert "one step late?" not in changed[0].message


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_a_gradient_that_was_not_set_to_zero_is_the_sum_of_two(micro_steps: int) -> None:
    before = entry(NOISE * np.float32(0.3)).summary

    found = look(X, X + NOISE * np.float32(0.3), previous=before, micro_steps=micro_steps)

    assert found.kind == "accumulated"
    assert "of this step and of the step before" in found.message


def test_another_gradient_on_top_is_not_that_of_the_step_before() -> None:
    before = entry(random(32, 40, seed=2)).summary

    assert look(X, X + NOISE * np.float32(0.3), previous=before).kind == "value"
    mixed = look(X, X + NOISE * np.float32(0.3), previous=entry(NOISE * np.float32(0.2)).summary)
    assert mixed.message == (
        "The candidate's is 1 x the baseline's of this step plus 1.5 x that of the step before: are gradients of "
        "several steps mixed?"
    )


def test_the_sum_of_two_activations_is_nothing_that_zero_grad_explains() -> None:
    before = entry(NOISE).summary

    assert look(X, X + NOISE, previous=before, phase="forward", slot="output[0]").kind == "value"


@pytest.mark.parametrize(("factor", "read"), [(1.002, True), (1.0019, True), (0.9986, False), (1.004, False)])
def test_near_one_a_factor_is_read_only_where_it_is_that_factor(factor: float, read: bool) -> None:
    assert bool(factor_meaning(factor, 1, known=[(1.002, "= what clipping makes of them")])) is read


@pytest.mark.parametrize(
    ("share", "others", "explained"),
    [(0.3, 1.0, True), (0.3, 1 / 0.7**0.5, False), (0.12, 0.8, False)],
    ids=["as they were", "scaled up as dropout does", "also smaller"],
)
def test_zeros_explain_a_difference_that_is_as_large_as_they_make_it(
    share: float, others: float, explained: bool
) -> None:
    is_zero = np.random.default_rng(5).random(X.shape) < share

    after = np.where(is_zero, 0, X * np.float32(others)).astype(np.float32)
    found = look(X, after, phase="forward", slot="output[0]")

    assert found.kind == "zeros"
    assert ("The difference is about as large as that makes it." in found.message) == explained
    assert ("was a mask, dropout or a gate left out, or added?" in found.message) == (not explained)


def test_few_zeros_are_nothing_to_speak_of() -> None:
    for count, kind in ((15, "value"), (16, "zeros")):
        candidate = X.copy()
        candidate.reshape(-1)[np.random.default_rng(6).permutation(X.size)[:count]] = 0
        assert (look(X, candidate).kind == "zeros") == (kind == "zeros")


@pytest.mark.parametrize(("left", "kind"), [(0.0, "state-lost"), (0.4, "state-lost"), (0.88, "value")])
def test_a_running_average_that_begins_anew_lacks_what_was_in_it(left: float, kind: str) -> None:
    before = random(32, 40, seed=3)
    average = np.float32(0.9) * before + X
    state: dict[str, Any] = {"phase": "optimizer", "slot": "momentum_buffer", "previous": entry(before).summary}

    found = look(average, np.float32(left) * before + X, **state)

    assert found.kind == kind
    if kind == "state-lost":
        assert found.evidence["share"] == pytest.approx(0.9 - left, abs=1e-5)


def test_another_difference_of_a_running_average_is_no_lost_state() -> None:
    before = random(32, 40, seed=3)
    state: dict[str, Any] = {"phase": "optimizer", "slot": "momentum_buffer", "previous": entry(before).summary}

    assert look(np.float32(0.9) * before + X, np.float32(0.5) * before + NOISE, **state).kind == "value"


def test_a_gradient_that_one_runs_clipping_leaves_out_is_told_so() -> None:
    known = clipping_left_out(0.25, 0.5, common=2.0)

    assert factor_meaning(2.0, 1, known=known) == " (= 1/0.25, as if the candidate's clipping left it out)"
    assert factor_meaning(0.25, 1, known=known) == " (= 0.5, as if the baseline's clipping left it out)"
    assert clipping_left_out(1.0, 0.5, common=1.0) == []
