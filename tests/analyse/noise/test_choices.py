"""A router's choices that rounding turns: how many, where the recordings show it, and what they may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.analyse.noise.test_moments import rounded
from tests.analyse.noise.test_site_floors import site
from tests.made_up import Array, Seen, Step, random, record, same
from traindiff.analyse.compare import Comparison, compare
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.noise.choices import TurnedChoices, choices

TOKENS, WIDTH = 256, 16
HALF = {"dtype": "bfloat16"}
SHOWN = ("numbers", "rows", "zeros", "sorted", "scores")


def chosen(turned: int) -> Array:
    """The expert of each token; some tokens of expert 0 take expert 1."""
    found = np.random.default_rng(0).integers(0, 4, TOKENS)
    found[np.flatnonzero(found == 0)[:turned]] = 1
    return found


def routed(shown: str, turned: int, *, noise: float = 0.5, spoiled: int = 0) -> Step:
    """A step in bfloat16: `turned` tokens chose another expert, and `spoiled` further rows are wrong."""

    def half(values: Array, seed: int) -> Seen:
        moved = values * (1 + noise * 2.0**-8 * random(*values.shape, seed=seed))
        return Seen(values=rounded(moved), about=HALF)

    of_experts = [random(TOKENS, WIDTH, seed=20 + number) for number in range(4)]
    experts = chosen(turned)
    found: Step = {("param", "before", "moe.router.weight", "value"): Seen(values=random(4, WIDTH, seed=1))}
    found["forward", "", "fc", "output[0]"] = half(random(TOKENS, WIDTH, seed=2), 102)
    if shown in ("numbers", "sorted"):
        found["forward", "", "moe.router", "output[1]"] = Seen(values=experts)
    if shown == "scores":
        scores = np.where(experts[:, None] == np.arange(4), 8.0 + random(TOKENS, 1, seed=40), 0.0)
        found["forward", "", "moe.router", "output[0]"] = half(scores.astype(np.float32), 140)
    for number, rows in enumerate(of_experts if shown != "sorted" else ()):
        kept = rows[experts == number] if shown == "rows" else rows
        found["forward", "", f"moe.experts.{number}", "output[0]"] = half(kept, 110 + number)
    mixed = np.select([experts[:, None] == number for number in range(4)], of_experts).astype(np.float32)
    if shown == "sorted":  # weights of all experts in one tensor
        found["forward", "", "moe.experts.act", "output[0]"] = half(mixed[np.argsort(experts, kind="stable")], 119)
    if spoiled:
        mixed[TOKENS - spoiled :] = random(spoiled, WIDTH, seed=3)
    found["forward", "", "moe", "output[0]"] = half(mixed, 120)
    found["forward", "", "head", "output[0]"] = half(mixed[:, :8] * 2, 121)
    if shown == "zeros":
        for number in range(4):
            values = random(TOKENS, WIDTH, seed=30 + number) * (experts[:, None] == number)
            found["backward", "", f"moe.experts.{number}", "output[0]"] = half(values.astype(np.float32), 130 + number)
    found["grad", "", "moe.router.weight", "grad"] = Seen(values=random(4, WIDTH, seed=4))
    found["param", "", "moe.router.weight", "value"] = Seen(values=random(4, WIDTH, seed=1) * np.float32(0.9))
    return found


def compared(here: Path, baseline: Step, candidate: Step) -> Comparison:
    paths = [
        record(here / name, same, steps=1, build=lambda _, found=found: found)
        for name, found in (("b", baseline), ("c", candidate))
    ]
    return compare(*paths)


@pytest.mark.parametrize("shown", SHOWN)
@pytest.mark.parametrize("turned", [1, 2])
def test_tokens_that_rounding_sends_to_another_expert_are_no_finding(shown: str, turned: int, tmp_path: Path) -> None:
    found = compared(tmp_path, routed(shown, 0, noise=0.0), routed(shown, turned))

    assert found.findings == (), str(found)
    (note,) = (one for one in found.notes if "choices of rows" in one)
    place = "moe.router" if shown in ("numbers", "sorted", "scores") else "moe.experts.0"
    least = 1 if shown in ("numbers", "sorted") else turned  # numbers that differ do not show how many
    assert f"first at step 0, {place}: at least {least} of 256." in note
    row = next(one for one in found.differences if (one.phase, one.path) == ("forward", "moe"))
    assert row.difference > 8 * 2.0**-8 or turned == 1  # more than the gain of what came in
    assert row.floor < 0.6


@pytest.mark.parametrize("shown", SHOWN)
def test_with_equal_inputs_no_token_may_choose_otherwise(shown: str, tmp_path: Path) -> None:
    found = compared(tmp_path, routed(shown, 0, noise=0.0), routed(shown, 1, noise=0.0))

    assert found.verdict == "diverged"
    assert not any("choices of rows" in one for one in found.notes)


@pytest.mark.parametrize("shown", SHOWN)
def test_more_tokens_than_rounding_turns_are_a_finding(shown: str, tmp_path: Path) -> None:
    found = compared(tmp_path, routed(shown, 0, noise=0.0), routed(shown, 60))

    assert found.verdict == "diverged"


@pytest.mark.parametrize("shown", SHOWN)
def test_wrong_rows_beside_a_turned_choice_are_found(shown: str, tmp_path: Path) -> None:
    found = compared(tmp_path, routed(shown, 0, noise=0.0), routed(shown, 1, spoiled=40))

    assert found.first_divergence is not None
    assert found.first_divergence.path == "moe"


@pytest.mark.parametrize("shown", SHOWN)
def test_wrong_rows_without_a_turned_choice_are_held_against_their_inputs(shown: str, tmp_path: Path) -> None:
    """Two of 256 rows: less than a turned choice may change, which no recording shows here."""
    found = compared(tmp_path, routed(shown, 0, noise=0.0), routed(shown, 0, spoiled=2))

    assert found.first_divergence is not None
    assert found.first_divergence.path == "moe"


def test_rows_outside_of_the_block_of_a_router_are_compared_one_by_one(tmp_path: Path) -> None:
    def build(turned: int, noise: float) -> Step:
        found = routed("sorted", turned, noise=noise).items()
        return {(*key[:2], key[2].replace("moe.experts", "other"), key[3]): one for key, one in found}

    found = compared(tmp_path, build(0, 0.0), build(1, 0.5))

    assert found.first_divergence is not None
    assert found.first_divergence.path == "other.act"


@pytest.mark.parametrize(("shape", "counts"), [((TOKENS, 2), True), ((TOKENS, 100), False)])
def test_choices_that_cannot_be_compared_one_by_one_may_have_turned(shape: tuple[int, int], counts: bool) -> None:
    """The runs divide the batch among other micro-steps."""
    numbers = site(np.zeros(shape, dtype=np.int64), path="moe.router", slot="output[2]").baseline
    found = TurnedChoices([], [numbers], most=lambda *_: 8.0)
    output = site(random(TOKENS, WIDTH, seed=0), path="moe")

    assert (found.floor(output, inputs=0.01, precision=0.0) > 0.2) == counts
    assert found.floor(output, inputs=1e-6, precision=0.0) == 0.0
    assert found.explained == []


def experts(zeros: dict[int, tuple[int, int]], *shape: int) -> list[Pair]:
    """Outputs of experts, and gradients of them in which so many rows are zero in each run."""
    found = []
    for number, counts in zeros.items():
        path = f"moe.experts.{number}"
        found.append(site(random(*shape, seed=number), path=path))
        sides = []
        for count in counts:
            values = random(*shape, seed=number).reshape(-1, shape[-1])
            values[:count] = 0.0
            sides.append(values.reshape(shape))
        found.append(site(sides[0], sides[1], path=path, phase="backward"))
    return found


@pytest.mark.parametrize("shape", [(24, 4), (3, 8, 4), (3, 4, 2, 4)])
def test_rows_of_zeros_are_counted_over_all_axes_but_the_last(shape: tuple[int, ...]) -> None:
    (choice,) = choices(experts({0: (10, 12), 1: (14, 12)}, *shape))

    assert (choice.where, choice.rows, choice.turned, choice.gathered) == ("moe.experts.0", 24, 2, False)
    assert choice.chosen == {"moe.experts.0": 14, "moe.experts.1": 10}


@pytest.mark.parametrize(
    "zeros",
    [{0: (10, 10), 1: (14, 14)}, {0: (10, 12)}, {0: (0, 2), 1: (14, 12)}, {0: (10, 11), 1: (14, 14)}],
    ids=["the same", "no siblings", "none in the baseline", "none gets what another loses"],
)
def test_rows_of_zeros_that_tell_of_no_choice(zeros: dict[int, tuple[int, int]]) -> None:
    assert choices(experts(zeros, 24, 4)) == []


def test_zeros_that_are_no_whole_rows_tell_of_no_choice() -> None:
    pairs = experts({0: (10, 12), 1: (14, 12)}, 24, 4)
    values = random(24, 4, seed=0)
    values[:10, :3] = 0.0
    pairs[1] = site(
        values, random(24, 4, seed=0) * (np.arange(24) > 3)[:, None], path="moe.experts.0", phase="backward"
    )

    assert choices(pairs) == []


def exchanged(moved: Mapping[int, int], *, columns: int = 4, noise: float = 0.0) -> list[Pair]:
    """A router of 24 rows, and four experts with 8 to 14 of them; some get another row at this place."""
    found = [site(random(24, columns, seed=9), path="moe.router")]
    for number, rows in enumerate((14, 12, 8, 14)):
        values = random(rows, 16, seed=number)
        other = values * (1 + noise * random(rows, 16, seed=30 + number))
        if number in moved:  # the rows behind the place move up, and another comes last
            other = np.concatenate([np.delete(other, moved[number], 0), random(1, 16, seed=20 + number)])
        found.append(site(values, other, path=f"moe.experts.{number}"))
    ordered = (replace(pair.baseline, order=order) for order, pair in enumerate(found))
    return [replace(pair, baseline=entry) for pair, entry in zip(found, ordered, strict=True)]


@pytest.mark.parametrize("moved", [{2: 0, 3: 4}, {0: 13, 1: 11}, {0: 1, 1: 5, 3: 2}])
def test_rows_that_experts_have_exchanged_tell_of_a_choice(moved: dict[int, int]) -> None:
    (choice,) = choices(exchanged(moved, noise=0.004))

    assert (choice.where, choice.rows, choice.turned, choice.gathered) == ("moe.experts.0", 48, 2, True)
    assert set(choice.chosen) == {f"moe.experts.{number}" for number in moved}


@pytest.mark.parametrize(
    "pairs",
    [
        exchanged({2: 0}),
        exchanged({0: 0, 1: 0, 2: 0, 3: 0}),
        exchanged({}, noise=0.1),
        exchanged({2: 0, 3: 4}, columns=3),
        exchanged({2: 0, 3: 4})[1:],
    ],
    ids=["one expert", "all experts", "all by a little", "a router of three", "no router"],
)
def test_experts_that_differ_in_another_way_tell_of_no_choice(pairs: list[Pair]) -> None:
    assert choices(pairs) == []


def rows_of(experts_of_tokens: Array, other: Array, *, most: float = 1.0) -> TurnedChoices:
    pair = site(experts_of_tokens, other, path="moe.router")
    return TurnedChoices([pair], most=lambda _, computed: most)


TOKENS_OF = np.zeros(256, dtype=np.int64)


def turned_tokens(count: int) -> Array:
    return np.where(np.arange(256) < count, 1, 0)


def test_one_turned_choice_of_256_is_worth_two_rows_and_their_chance() -> None:
    found = rows_of(TOKENS_OF, turned_tokens(1))

    assert found.floor(site(random(256, 4, seed=0)), inputs=0.0, precision=0.0) == pytest.approx(
        np.sqrt(2 * (1 + 1) / 256)
    )
    assert len(found.explained) == 1


def test_of_a_gradient_a_few_rows_may_hold_most() -> None:
    values = np.ones((256, 4), dtype=np.float32)
    values[7, 2] = 5.0
    peak = 25 * 1024 / (1023 + 25)

    found = rows_of(TOKENS_OF, turned_tokens(1)).floor(site(values, phase="backward"), inputs=0.0, precision=0.0)

    assert found == pytest.approx(np.sqrt(2 * (1 + peak) / 256), rel=1e-6)


def test_more_choices_than_rounding_turns_explain_nothing() -> None:
    found = rows_of(TOKENS_OF, turned_tokens(1), most=0.9)

    assert found.floor(site(random(256, 4, seed=0)), inputs=0.0, precision=0.0) == 0.0
    assert found.explained == []


def picked(rows: Mapping[int, int], *, size: float) -> Callable[[int], Step]:
    """A module that picks as many rows as the data ask for, behind a tensor with a difference of this size."""

    def build(step: int) -> Step:
        noisy = random(64, 8, seed=step) * (1 + size * random(64, 8, seed=7))
        return {
            ("forward", "", "fc", "output[0]"): Seen(values=rounded(noisy), about=HALF),
            ("forward", "", "pick", "output[0]"): Seen(values=rounded(random(rows[step], 8, seed=9)), about=HALF),
            ("param", "", "fc.weight", "value"): Seen(values=random(8, 8, seed=8)),
        }

    return build


def test_numbers_of_rows_that_rounding_may_change_are_said_with_the_first_step(tmp_path: Path) -> None:
    """What a step picks is known to depend on the data only if another step picked another number."""
    sides = [({0: 40, 1: 50, 2: 60}, 0.0), ({0: 40, 1: 51, 2: 61}, 2.0**-8)]
    paths = [
        record(tmp_path / str(number), same, steps=3, build=picked(rows, size=size))
        for number, (rows, size) in enumerate(sides)
    ]

    found = compare(*paths)

    assert found.findings == (), str(found)
    (note,) = (one for one in found.notes if "was made otherwise" in one)
    assert "first at step 1, forward of pick output[0]: 51 rows, 50 in the baseline." in note


def quantized(turned: int, *, dtype: str) -> Step:
    """A step with a codebook of 16 rows, of which `turned` samples took another than in the baseline."""
    codebook, taken = random(16, WIDTH, seed=5), np.arange(TOKENS) % 16
    taken[:turned] = (taken[:turned] + 1) % 16
    about = {"dtype": dtype}
    found: Step = {("param", "before", "fc.weight", "value"): Seen(values=random(4, WIDTH, seed=1))}
    found["forward", "", "fc", "output[0]"] = Seen(values=rounded(random(TOKENS, WIDTH, seed=2)), about=about)
    found["forward", "", "vq", "output[0]"] = Seen(values=rounded(codebook[taken]), about=about)
    found["forward", "", "vq", "output[1]"] = Seen(values=taken)
    found["grad", "", "fc.weight", "grad"] = Seen(values=random(4, WIDTH, seed=4))
    found["param", "", "fc.weight", "value"] = Seen(values=random(4, WIDTH, seed=1) * np.float32(0.9))
    return found


@pytest.mark.parametrize(
    ("dtype", "turned", "verdict"),
    [("bfloat16", 1, "equivalent"), ("bfloat16", 3, "equivalent"), ("bfloat16", 128, "diverged"),
     ("float32", 1, "diverged")],
)  # fmt: skip
def test_a_codebook_chooses_by_distances_that_are_rounded_where_nobody_sees(
    dtype: str, turned: int, verdict: str, tmp_path: Path
) -> None:
    found = compared(tmp_path, quantized(0, dtype=dtype), quantized(turned, dtype=dtype))

    assert found.verdict == verdict, str(found)
    assert any("choices of rows" in note for note in found.notes) is (verdict == "equivalent")
    assert [one.path for one in found.findings[:1]] == (["vq"] if verdict == "diverged" else [])
