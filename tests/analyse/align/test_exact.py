"""What must be equal to the bit: batches, settings, initial parameters, random state."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import only, part
from tests.made_up import CONTENT, Array, Compared, Edit, Seen, Step, at, both, observed, plain_step, random, record
from traindiff.analyse.align.exact import check_batch, check_random_state, permuted_paths
from traindiff.analyse.compare import compare
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.step_table import step_table
from traindiff.storage import RecordingWriter

INPUT = ("batch", "", "", "input[0]")
LABELS = ("batch", "", "", "input.labels")
INITIAL = ("param", "before", "fc.weight", "value")


def first(compared: Compared, edit: Edit, **options: object) -> Finding:
    comparison = compared(edit, **options)
    assert comparison.verdict == "misaligned"
    assert comparison.first_divergence is not None
    return comparison.first_divergence


def test_other_values_in_the_batch(compared: Compared) -> None:
    finding = first(compared, at(INPUT, lambda x: x + np.float32(1e-6), step=2))

    assert (finding.kind, finding.step, finding.phase) == ("batch", 2, "batch")
    assert finding.message == "The batch differs: (root) input[0] holds other values."


def test_the_same_batch_in_another_order(compared: Compared) -> None:
    assert first(compared, at(INPUT, lambda x: x[::-1])).message == (
        "The batch differs: (root) input[0] holds the same values in another order."
    )


def test_a_batch_of_another_shape(compared: Compared) -> None:
    assert first(compared, at(INPUT, lambda x: x[:, :5])).message == (
        "The batch differs: (root) input[0] has shape [5, 6] in the baseline, [5, 5] in the candidate."
    )


def test_a_batch_of_another_kind_of_number(compared: Compared) -> None:
    finding = first(compared, at(INPUT, lambda x: x.astype(np.int64)))

    assert finding.message == "The batch differs: (root) input[0] is float32 in the baseline, int64 in the candidate."


@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_the_same_numbers_in_another_precision_are_the_same_batch(compared: Compared, dtype: str) -> None:
    comparison = compared(at(INPUT, lambda x: x.astype(dtype)))

    assert comparison.verdict == "equivalent"
    assert not comparison.findings


def test_labels_of_another_width_are_the_same_labels(compared: Compared) -> None:
    def labels(dtype: str, values: list[int]) -> Edit:
        def edit(_step: int, sites: Step) -> None:
            sites[LABELS] = Seen(values=np.array(values, dtype))

        return edit

    same = compared(labels("int32", [3, 1, 2]), baseline_edit=labels("int64", [3, 1, 2]))
    other = compared(labels("int32", [3, 1, 1]), baseline_edit=labels("int64", [3, 1, 2]))

    assert same.verdict == "equivalent"
    assert [one.difference for one in same.differences if one.slot == "input.labels"] == [0.0]
    assert other.verdict == "misaligned"


def test_shifted_labels(compared: Compared) -> None:
    def labels(shift: int) -> Edit:
        def edit(_step: int, sites: Step) -> None:
            sites[LABELS] = Seen(values=np.arange(shift, shift + 6))

        return edit

    finding = first(compared, labels(1), baseline_edit=labels(0))
    assert (finding.kind, finding.slot) == ("batch", "input.labels")


def test_what_follows_from_another_batch_is_not_found_again(compared: Compared) -> None:
    def all_else(_step: int, sites: Step) -> None:
        for site, seen in sites.items():
            if site == INPUT or site[0] in ("forward", "backward", "grad"):
                seen.values = seen.values * np.float32(1.5)

    comparison = compared(all_else)
    assert {finding.kind for finding in comparison.findings} == {"batch"}


def test_other_initial_parameters(compared: Compared) -> None:
    finding = first(compared, at(INITIAL, lambda x: x + 1, step=0))

    assert finding.kind == "initial-parameter"
    assert finding.message == "fc.weight starts with other values: another seed, initialization or checkpoint?"


def test_permuted_initial_parameters(compared: Compared) -> None:
    finding = first(compared, at(INITIAL, lambda x: x[[1, 0, 2, 3, 4, 5, 6, 7]], step=0))

    assert (
        finding.message == "fc.weight starts with the same values in another order (a converted checkpoint, permuted?)."
    )


def test_initial_parameters_in_another_precision_are_the_same_if_their_values_are(compared: Compared) -> None:
    rounded = compared(at(INITIAL, lambda x: x.astype(np.float16), step=0))
    other = compared(at(INITIAL, lambda x: (x + 1).astype(np.float16), step=0))

    assert "initial-parameter" not in {finding.kind for finding in rounded.findings}
    assert other.verdict == "misaligned"


def test_random_state_counts_only_where_a_forward_pass_draws_from_it(compared: Compared) -> None:
    def state(before: int, after: int) -> Edit:
        def edit(_step: int, sites: Step) -> None:
            for stage, value in (("before", before), ("after", after)):
                sites["batch", stage, "rng", "cpu"].values = np.full(4, value, np.uint8)

        return edit

    unused = compared(state(9, 9), baseline_edit=state(5, 5))
    drawn = compared(state(9, 10), baseline_edit=state(5, 6))
    equal = compared(state(5, 6), baseline_edit=state(5, 6))

    assert unused.verdict == "identical"
    assert equal.verdict == "identical"
    assert drawn.verdict == "misaligned"
    assert drawn.first_divergence is not None
    assert drawn.first_divergence.message == (
        "torch's cpu random state differs before the forward pass, which draws from it: "
        "masks and samples cannot be the same."
    )


def test_masks_of_another_number_of_micro_batches_cannot_be_the_same(tmp_path: Path) -> None:
    def passes(*states: int) -> Path:
        path = tmp_path / str(states)
        about = {"world_size": 1, "mesh": None, "settings": {"observe": ["batch"], "ranks": None}}
        writer = RecordingWriter(str(path), run=about)
        pairs = [
            observed(
                ("batch", stage, "rng", "cpu"),
                Seen(values=np.full(4, value, np.uint8), about={"micro_step": micro_step}),
                step=0,
                order=2 * micro_step + (stage == "after"),
            )
            for micro_step, (before, after) in enumerate(pairwise(states))
            for stage, value in (("before", before), ("after", after))
        ]
        writer.write_step([one for one, _ in pairs], np.array([summary for _, summary in pairs]))
        writer.close()
        return path

    finding = compare(passes(1, 2), passes(1, 3, 4)).first_divergence
    assert finding is not None
    assert finding.kind == "random-state"
    assert finding.message.startswith(
        "2 forward passes of the candidate draw from torch's cpu generator in a step, and 1 of the baseline: "
    )
    assert compare(passes(1, 1), passes(1, 1, 1)).verdict == "identical"


def test_another_learning_rate_names_values_and_parameters(compared: Compared) -> None:
    finding = first(compared, at(("optimizer", "", "optimizer.groups[0]", "lr"), lambda x: x * 2, step=1))

    assert (finding.kind, finding.step, finding.slot) == ("hyper-parameter", 1, "lr")
    assert finding.message == (
        "lr is 0.1 in the baseline and 0.2 in the candidate, for 2 parameters (fc.weight, head.weight)."
    )
    assert finding.evidence["paths"] == ["fc.weight", "head.weight"]


def test_a_setting_that_differs_in_every_step_is_reported_once(compared: Compared) -> None:
    comparison = compared(at(("optimizer", "", "optimizer.groups[1]", "lr"), lambda x: x * 2))

    assert [finding.kind for finding in comparison.findings] == ["hyper-parameter"]


@pytest.mark.parametrize(("name", "found"), [("d", []), ("betas[0]", ["hyper-parameter"])])
def test_what_an_optimizer_computes_and_keeps_among_its_settings_is_none(
    compared: Compared, name: str, found: list[str]
) -> None:
    """As Prodigy does its step size: it begins equal, and follows from gradients. Momentum follows a schedule."""

    def keeping(factor: float) -> Edit:
        def edit(step: int, sites: Step) -> None:
            sites["optimizer", "", "optimizer.groups[0]", name] = Seen(values=np.array(0.5 + step * factor))

        return edit

    comparison = compared(keeping(0.1 + 1e-6), baseline_edit=keeping(0.1))

    assert [finding.kind for finding in comparison.findings] == found


def test_a_constant_setting_that_one_run_changes_is_found(compared: Compared) -> None:
    def keeping(factor: float) -> Edit:
        def edit(step: int, sites: Step) -> None:
            sites["optimizer", "", "optimizer.groups[0]", "rho"] = Seen(values=np.array(0.5 + step * factor))

        return edit

    finding = compared(keeping(0.1), baseline_edit=keeping(0.0)).first_divergence

    assert finding is not None
    assert (finding.kind, finding.step) == ("hyper-parameter", 1)


def test_settings_are_compared_by_parameter_and_not_by_group(compared: Compared) -> None:
    groups = [["fc.bias"], ["head.weight"], ["fc.weight"]]

    def regrouped(decays: tuple[float, ...]) -> Edit:
        def edit(_step: int, sites: Step) -> None:
            for number, decay in enumerate(decays):
                for slot, value in (("lr", 0.1), ("weight_decay", decay)):
                    sites["optimizer", "", f"optimizer.groups[{number}]", slot] = Seen(values=np.array(value))

        return edit

    content = {**CONTENT, "optimizers": [{"name": "optimizer", "type": "SGD", "groups": groups}]}
    same = compared(regrouped((0.0, 0.01, 0.01)), content=content)
    other = compared(regrouped((0.01, 0.01, 0.01)), content=content)

    assert same.verdict == "identical", str(same)
    assert not any(same.unaligned)
    assert other.first_divergence is not None
    assert other.first_divergence.message == "weight_decay is 0 in the baseline and 0.01 in the candidate, for fc.bias."


def test_updates_under_other_settings_are_no_further_finding(compared: Compared) -> None:
    def edit(_step: int, sites: Step) -> None:
        for number in range(2):
            sites["optimizer", "", f"optimizer.groups[{number}]", "lr"].values = np.array(0.2)
        for site, seen in sites.items():
            if site[0] == "optimizer" and site[3] == "momentum_buffer":
                seen.values = seen.values * np.float32(2)

    assert {finding.kind for finding in compared(edit).findings} == {"hyper-parameter"}


def test_parameters_that_the_model_does_not_name_are_no_settings(compared: Compared) -> None:
    def more(step: int, sites: Step) -> None:
        site = ("optimizer", "", "optimizer.groups[0].params[2]", "momentum_buffer")
        sites[site] = Seen(values=np.ones(3, np.float32) * (1 + step))

    assert compared(more, baseline_edit=more).verdict == "identical"


def test_state_that_another_optimizer_keeps_is_unknown_and_not_a_missing_parameter(compared: Compared) -> None:
    def more(step: int, sites: Step) -> None:
        sites["optimizer", "", "fc.bias", "step"] = Seen(values=np.array(step + 1.0))

    comparison = compared(more)
    assert comparison.verdict == "incomplete"
    assert [(one.path, one.slot) for one in comparison.unaligned[1]] == [("fc.bias", "step")]


@pytest.mark.parametrize("candidate", [0.1 + 1e-16, float(np.float32(0.1))])
def test_a_setting_that_differs_by_its_own_rounding_is_the_same(compared: Compared, candidate: float) -> None:
    comparison = compared(at(("optimizer", "", "optimizer.groups[0]", "lr"), lambda x: np.array(candidate)))

    assert comparison.verdict == "identical"


def test_a_small_difference_of_a_setting_is_shown_with_enough_digits(compared: Compared) -> None:
    finding = first(compared, at(("optimizer", "", "optimizer.groups[1]", "lr"), lambda x: np.array(0.1000001)))

    assert finding.message == "lr is 0.1 in the baseline and 0.1000001 in the candidate, for fc.bias."


VALUES = np.arange(6, dtype=np.float32)
ONES = np.ones(6, dtype=np.float32)


def held(baseline: Array, candidate: Array, path: str, stage: str = "before", phase: str = "param") -> Pair:
    """A tensor on both sides."""
    site = (phase, stage, path, "value")
    return Pair(baseline=only([part(baseline, site=site)]), candidate=only([part(candidate, site=site)]))


def test_where_parameters_are_permuted_those_of_one_value_may_be_too() -> None:
    pairs = [
        held(VALUES, VALUES, "equal"),
        held(ONES, ONES, "norm.weight"),
        held(np.float32(1.0), np.float32(1.0), "scale"),
        held(ONES[:1], ONES[:1], "one"),
        held(VALUES, VALUES[::-1], "after", stage=""),
        held(VALUES, VALUES[::-1], "activation", stage="", phase="forward"),
        held(VALUES, VALUES[::-1].astype(np.float64), "longer"),
    ]

    assert permuted_paths(pairs) == set()
    assert permuted_paths([*pairs, held(VALUES, VALUES[::-1], "fc.weight")]) == {"fc.weight", "norm.weight"}


@pytest.mark.parametrize(("error", "same"), [(2.0**-12, True), (2.0**-9, False)])
def test_a_batch_in_another_precision_is_the_same_up_to_its_rounding(error: float, same: bool) -> None:
    rounded = (VALUES * np.float32(1 + error)).astype(np.float16)

    assert (check_batch(held(VALUES, rounded, "", phase="batch", stage=""), step=0) is None) == same
    assert (check_batch(held(rounded, VALUES, "", phase="batch", stage=""), step=0) is None) == same


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_setting_that_is_not_finite_is_no_setting_of_zero(compared: Compared, value: float) -> None:
    site = ("optimizer", "", "optimizer.groups[0]", "lr")
    (finding,) = compared(at(site, lambda _: value), baseline_edit=at(site, lambda _: 0.0)).findings[:1]

    assert (finding.kind, finding.evidence["baseline"]) == ("hyper-parameter", 0.0)
    assert np.array_equal(finding.evidence["candidate"], value, equal_nan=True)


EVALUATED = ("forward", "evaluation", "fc", "output[0]")


def evaluating(step: int) -> Step:
    """A step that begins with an evaluation, and then draws random numbers."""
    sites = plain_step(step)
    sites["batch", "after", "rng", "cpu"].values = np.full(4, step + 100, dtype=np.uint8)
    return {EVALUATED: Seen(values=random(5, 8, seed=step)), **sites}


@pytest.mark.parametrize(("size", "first"), [(1e-2, "value"), (1e-9, "random-state")])
def test_an_evaluation_before_the_random_state_is_judged_without_it(tmp_path: Path, size: float, first: str) -> None:
    state = at(("batch", "before", "rng", "cpu"), lambda values: values + 9, step=1)
    other = both(state, at(EVALUATED, lambda x: x + np.float32(size) * random(5, 8, seed=9), step=1))
    found = compare(record(tmp_path / "a", build=evaluating), record(tmp_path / "b", other, build=evaluating))

    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.step) == (first, 1)
    row = next(one for one in found.differences if one.stage == "evaluation")
    assert (row.ratio > 1.0) is (first == "value")


@pytest.mark.parametrize(
    ("baseline", "candidate", "what"),
    [
        (np.arange(24), np.arange(24, dtype=np.int32), None),
        (np.arange(24), np.arange(24, dtype=np.int32).reshape(4, 6), "has shape [24] in the baseline, [4, 6] in"),
        (np.arange(24), np.arange(1, 25, dtype=np.int32), "is int64 in the baseline, int32 in the candidate"),
        (np.zeros(24), -np.zeros(24), "holds other values"),  # division tells them apart
        (np.zeros(24), -np.zeros(24, dtype=np.float32), None),
    ],
)
def test_a_batch_in_another_dtype_is_the_same_with_its_numbers_and_its_shape(
    baseline: Array, candidate: Array, what: str | None
) -> None:
    finding = check_batch(
        Pair(baseline=only([part(baseline, site=INPUT)]), candidate=only([part(candidate, site=INPUT)])), step=0
    )

    assert (what in finding.message) if finding and what else finding is what


def test_another_number_of_forward_passes_that_draw_is_placed_where_the_baseline_draws_first() -> None:
    def drawn(passes: int, first: int) -> dict:
        states = [(micro_step, stage) for micro_step in range(passes) for stage in ("before", "after")]
        return step_table([
            part(
                np.full(4, number + 2 if stage == "after" else micro_step, dtype=np.uint8), order=first + number,
                site=("batch", stage, "rng", "cpu"), micro_step=micro_step,
            )
            for number, (micro_step, stage) in enumerate(states)
        ])  # fmt: skip

    (finding,) = check_random_state(drawn(2, 10), drawn(3, 20), step=1)

    assert (finding.kind, finding.step, finding.order) == ("random-state", 1, 10)
    assert finding.message.startswith(
        "3 forward passes of the candidate draw from torch's cpu generator in a step, and 2 of the baseline"
    )
    assert list(check_random_state(drawn(2, 10), drawn(2, 20), step=1)) == []
