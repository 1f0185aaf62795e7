"""What follows from the first divergence: neither in agreement, nor a further finding, nor a cover for one."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from tests.made_up import BATCH, FC, HEAD, Compared, Edit, Measured, Seen, Step, both, plain_step, rotated, scaled
from traindiff.analyse.compare import Comparison
from traindiff.analyse.compare.verdict import joined_rows
from traindiff.analyse.findings import SITE_WORDS, word_of
from traindiff.analyse.merge.history import DifferenceHistory, weight_of
from traindiff.present.data import as_csv, as_junit, as_markdown
from traindiff.present.data.step_rows import step_rows

BACK_HEAD = ("backward", "", "head", "output[0]")
BACK_FC = ("backward", "", "fc", "output[0]")
OF_FC = ("grad", "", "fc.weight", "grad")
OF_HEAD = ("grad", "", "head.weight", "grad")
STATE = ("optimizer", "", "fc.weight", "momentum_buffer")
WEIGHT = ("param", "", "fc.weight", "value")


def words(result: Comparison) -> dict[tuple[str, str], str]:
    return {(row.phase, row.path): row.word for row in result.differences if row.word != "identical"}


def places(result: Comparison) -> list[tuple[str, str]]:
    return [(finding.phase, finding.path) for finding in result.findings]


def once(*edits: Edit, step: int) -> Edit:
    def edit(number: int, sites: Step) -> None:
        if number == step:
            both(*edits)(number, sites)

    return edit


def test_a_difference_that_the_inputs_explain_follows(compared: Compared) -> None:
    result = compared(once(rotated(FC, 1e-2), rotated(HEAD, 2e-2), step=1))

    assert places(result) == [("forward", "fc")]
    assert words(result) == {("forward", "fc"): "above", ("forward", "head"): "follows"}
    head = next(row for row in result.differences if row.path == "head" and row.phase == "forward")
    assert head.undisturbed < 1e-5 < head.difference < head.floor


def test_a_difference_below_the_undisturbed_floor_is_within_it(compared: Compared) -> None:
    result = compared(once(rotated(FC, 1e-2), rotated(HEAD, 1e-7), step=1))

    assert words(result) == {("forward", "fc"): "above", ("forward", "head"): "within"}


def test_a_second_fault_is_above_what_follows_from_the_first(compared: Compared) -> None:
    result = compared(once(rotated(FC, 1e-2), rotated(HEAD, 2e-2), rotated(BACK_FC, 0.5), step=1))

    assert places(result) == [("forward", "fc"), ("backward", "fc")]
    second = result.findings[1]
    assert second.evidence["independent"]
    assert second.message.endswith("(This is more than is expected to follow from the first divergence.)")
    assert "independent" not in result.findings[0].evidence


def test_before_any_divergence_nothing_follows(compared: Compared) -> None:
    result = compared(both(rotated(FC, 1e-6), rotated(HEAD, 6e-6), rotated(OF_HEAD, 2e-5)))

    assert result.verdict == "equivalent"
    assert set(words(result).values()) == {"within"}
    assert all(row.undisturbed == row.floor for row in result.differences)


def test_what_follows_does_not_raise_undisturbed_floors(compared: Compared) -> None:
    """Else each site would raise that of the next by the gain, and soon all would be within."""
    result = compared(
        once(rotated(FC, 1e-2), rotated(HEAD, 2e-2), rotated(BACK_HEAD, 3e-2), rotated(BACK_FC, 4e-2), step=1)
    )

    rows = [row for row in result.differences if row.word == "follows"]
    assert [(row.phase, row.path) for row in rows][:3] == [
        ("forward", "head"),
        ("backward", "head"),
        ("backward", "fc"),
    ]
    assert all(row.undisturbed < 1e-5 for row in rows)


def test_noise_before_the_divergence_raises_undisturbed_floors(compared: Compared) -> None:
    quiet = compared(once(rotated(HEAD, 1e-2), rotated(BACK_HEAD, 5e-6), step=1))
    noisy = compared(once(rotated(FC, 1e-6), rotated(HEAD, 1e-2), rotated(BACK_HEAD, 5e-6), step=1))

    assert words(quiet)["backward", "head"] == "follows"
    assert words(noisy)["backward", "head"] == "within"


def test_noise_of_the_step_before_the_divergence_raises_undisturbed_floors(compared: Compared) -> None:
    noise = once(rotated(FC, 1e-6), rotated(HEAD, 5e-6), rotated(BACK_HEAD, 1e-5), step=0)
    wrong = once(rotated(FC, 1e-2), rotated(HEAD, 7e-6), rotated(BACK_HEAD, 3e-5), step=1)

    assert words(compared(wrong)) == {
        ("forward", "fc"): "above", ("forward", "head"): "follows", ("backward", "head"): "follows",
    }  # fmt: skip
    assert words(compared(both(noise, wrong))) == {
        ("forward", "fc"): "above", ("forward", "head"): "within", ("backward", "head"): "within",
    }  # fmt: skip


def test_a_canceled_sum_that_follows_does_not_pass_for_noise(compared: Compared) -> None:
    """A gradient that is mathematically zero has a floor above 1, so that nothing shows there; what follows does."""

    def canceled(_step: int, sites: Step) -> None:
        sites["grad", "", "fc.bias", "grad"].values *= np.float32(1e-9)

    wrong = once(rotated(FC, 1e-2), rotated(("grad", "", "fc.bias", "grad"), 0.3), rotated(OF_HEAD, 1e-3), step=1)

    found = words(compared(both(canceled, wrong), baseline_edit=canceled))

    assert found["grad", "fc.bias"] == "within"
    assert found["grad", "head.weight"] == "follows"


def test_state_and_update_follow_from_a_gradient(compared: Compared) -> None:
    result = compared(once(rotated(OF_FC, 0.01), rotated(STATE, 0.01), scaled(WEIGHT, 1e-4), step=1))

    assert places(result) == [("grad", "fc.weight")]
    found = words(result)
    assert found["optimizer", "fc.weight"] == found["update", "fc.weight"] == "follows"


def test_the_next_step_follows_from_a_parameter_that_was_updated_wrongly(compared: Compared) -> None:
    def later(step: int, sites: Step) -> None:
        if step == 0:
            both(rotated(OF_FC, 0.05), rotated(STATE, 0.05), scaled(WEIGHT, 1e-3))(step, sites)
        else:
            both(rotated(FC, 1e-3), rotated(HEAD, 1e-3), scaled(WEIGHT, 1e-3))(step, sites)

    result = compared(later)

    assert places(result) == [("grad", "fc.weight")]
    assert words(result)["forward", "fc"] == "follows"
    assert words(result)["forward", "head"] == "follows"


def test_everything_after_other_initial_values_follows(compared: Compared) -> None:
    start = ("param", "before", "fc.weight", "value")
    result = compared(both(scaled(start, 0.1, step=0), once(rotated(FC, 0.05), step=0)))

    assert result.verdict == "misaligned"
    assert words(result)["param", "fc.weight"] == "above"
    assert words(result)["forward", "fc"] == "follows"


def test_everything_after_another_batch_follows_and_is_not_judged(compared: Compared) -> None:
    result = compared(both(scaled(BATCH, 0.5), rotated(FC, 0.5), rotated(HEAD, 0.5)))

    assert words(result) == {("batch", ""): "above", ("forward", "fc"): "follows", ("forward", "head"): "follows"}
    assert any(
        note.startswith(
            "Not judged after the first divergence: forward of fc output[0], from step 0 on, and 1 more site."
        )
        for note in result.notes
    )


def test_a_large_inflow_is_said_to_hide_what_comes_after(compared: Compared) -> None:
    judged = compared(once(rotated(FC, 0.02), rotated(HEAD, 0.02), step=1))
    hidden = compared(once(rotated(FC, 0.3), rotated(HEAD, 0.3), step=1))

    assert not any(note.startswith("Not judged after") for note in judged.notes)
    assert any(note.startswith("Not judged after the first divergence: forward of head") for note in hidden.notes)


def test_whole_numbers_follow_where_a_divergence_precedes_them(compared: Compared) -> None:
    def indices(values: Any) -> Edit:
        def edit(_step: int, sites: Step) -> None:
            before = dict(sites)
            sites.clear()
            for site, seen in before.items():
                sites[site] = seen
                if site == FC:
                    sites["forward", "", "fc", "output[1]"] = Seen(values=np.asarray(values))

        return edit

    moved = both(indices([1, 2, 4]), once(rotated(FC, 1e-2), step=0))
    noise = both(indices([1, 2, 4]), once(rotated(FC, 1e-6), step=0))

    followed = compared(moved, baseline_edit=indices([1, 2, 3]), steps=1)
    noisy = compared(noise, baseline_edit=indices([1, 2, 3]), steps=1)

    assert [row.word for row in followed.differences if row.slot == "output[1]"] == ["follows"]
    assert [row.word for row in noisy.differences if row.slot == "output[1]"] == ["not judged"]


def test_after_settings_that_differ_updates_follow(compared: Compared) -> None:
    def rate(step: int, sites: Step) -> None:
        for number in (0, 1):
            sites["optimizer", "", f"optimizer.groups[{number}]", "lr"] = Seen(values=np.array(0.2))
        scaled(WEIGHT, 0.01)(step, sites)

    result = compared(rate)

    assert result.verdict == "misaligned"
    assert words(result)["update", "fc.weight"] == "follows"


def test_measured_floors_are_the_undisturbed_ones(measured: Measured) -> None:
    noise = both(rotated(FC, 1e-4), rotated(HEAD, 1e-4))
    within = measured(both(rotated(FC, 0.01), rotated(HEAD, 1e-4)), noise, noise)
    follows = measured(both(rotated(FC, 0.01), rotated(HEAD, 3e-3)), noise, noise)

    assert words(within) == {("forward", "fc"): "above", ("forward", "head"): "within"}
    assert words(follows) == {("forward", "fc"): "above", ("forward", "head"): "follows"}


def test_a_tolerance_has_no_inflow(compared: Compared) -> None:
    result = compared(both(rotated(FC, 0.1), rotated(HEAD, 0.01)), rtol=0.05)

    assert words(result) == {("forward", "fc"): "above", ("forward", "head"): "within"}


@pytest.mark.parametrize(
    ("difference", "floor", "undisturbed", "word"),
    [
        (2.0, 1.0, 1.0, "above"), (2.0, 1.0, 0.1, "above"), (0.5, 1.0, 0.1, "follows"), (0.05, 1.0, 0.1, "within"),
        (0.5, np.inf, 0.1, "follows"), (np.inf, np.inf, 0.1, "follows"), (0.5, np.inf, np.inf, "not judged"),
        (0.0, np.inf, np.inf, "within"), (np.inf, 1.0, 1.0, "above"),
    ],
)  # fmt: skip
def test_the_word_of_a_difference(difference: float, floor: float, undisturbed: float, word: str) -> None:
    assert word_of(difference, floor, undisturbed) == word


def test_weights_are_ordered_by_the_word_and_then_by_the_ratio() -> None:
    weights = [weight_of(word, ratio) for word in SITE_WORDS for ratio in (0.0, 1e-3, 0.9, 1e9, np.inf)]

    assert weights == sorted(weights)
    assert [SITE_WORDS[int(np.float32(weight))] for weight in weights] == [
        word for word in SITE_WORDS for _ in range(5)
    ]


# Every output.


def second_fault(compared: Compared, **options: Any) -> Comparison:
    return compared(once(rotated(FC, 1e-2), rotated(HEAD, 2e-2), rotated(BACK_FC, 0.5), step=1), **options)


def test_json_has_the_word_of_each_site_that_differs(compared: Compared) -> None:
    found = second_fault(compared).to_json()

    assert [(site["site"], site["phase"], site["word"]) for site in found["sites"]] == [
        ("fc", "forward", "above"), ("head", "forward", "follows"), ("fc", "backward", "above"),
    ]  # fmt: skip
    assert found["words"] == {"identical": 15, "not judged": 0, "within": 0, "follows": 1, "above": 2}


def test_tables_and_texts_have_the_words(compared: Compared) -> None:
    result = second_fault(compared)
    sentence = "18 sites: 15 identical, 2 above, 1 that follow from the first divergence."

    assert sentence in str(result)
    for form in (as_markdown, as_junit):
        file = io.StringIO()
        form.write(result, file)
        assert sentence in file.getvalue()
    table = io.StringIO()
    as_csv.write(result, table)
    header, *lines = table.getvalue().splitlines()
    column = header.split(",").index("word")
    assert [line.split(",")[column] for line in lines].count("follows") == 1


def test_the_history_has_the_word_of_each_cell(compared: Compared) -> None:
    result = second_fault(compared, history=True)

    assert isinstance(result.history, DifferenceHistory)
    rows = step_rows(result, result.history, None)
    assert {(row.key.phase, row.key.path): row.word for row in rows if row.word != "identical"} == words(result)


def test_a_shared_column_keeps_what_follows_rather_than_what_is_within() -> None:
    assert weight_of("follows", 1e-6) > weight_of("within", 1.0)


def test_rows_of_consecutive_comparisons_are_joined_site_by_site(compared: Compared) -> None:
    first, second = (
        compared(once(rotated(FC, 1e-6), step=1)),
        compared(once(rotated(FC, 1e-2), rotated(HEAD, 2e-2), step=2)),
    )

    joined = joined_rows((*first.differences, *second.differences))

    assert len(joined) == len(first.differences)
    found = {(row.phase, row.path): row for row in joined if row.word != "identical"}
    assert {place: row.word for place, row in found.items()} == {
        ("forward", "fc"): "above",
        ("forward", "head"): "follows",
    }
    fc = found["forward", "fc"]
    assert (fc.num_steps, fc.num_identical_steps, fc.first_other_bits, fc.step) == (6, 4, 1, 2)


def test_an_update_that_only_the_baseline_loses_follows_from_a_divergence(compared: Compared) -> None:
    """Rounding may take a whole update away in one run, and not in one whose gradient is another one."""

    def lost(step: int, sites: Step) -> None:
        if step == 1:
            sites[WEIGHT].values = plain_step(0)[WEIGHT].values

    alone = compared(lambda step, sites: None, baseline_edit=lost, steps=2)
    after = compared(once(rotated(FC, 0.05), step=1), baseline_edit=lost, steps=2)

    assert places(alone) == [("update", "fc.weight")]
    assert places(after) == [("forward", "fc")]
