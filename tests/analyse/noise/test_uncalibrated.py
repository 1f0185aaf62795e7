"""Floors: what they follow from, and what they let pass."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.made_up import Compared, Edit, Seen, Step, at, random, record, summary_of
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.distance import Pair
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.run_floors import RunFloors, at_the_beginning
from traindiff.analyse.noise.uncalibrated import ADAPTIVE_GAIN, FEW_FLIPS, GAIN, LATER_GAIN, UNEVEN, Floors
from traindiff.core.summary import UNIT_ROUNDOFF, rounding

FC = ("forward", "", "fc", "output[0]")
HEAD = ("forward", "", "head", "output[0]")


def test_rounding_is_a_few_units_of_the_dtype() -> None:
    assert rounding("float32") == 32 * 2.0**-24
    assert rounding("bfloat16") == 2 * 2.0**-8
    assert rounding("int64") == 0.0


# torch gives float8_e5m2fnuz the epsilon 1/8; with two fraction bits it is 1/4, as for float8_e5m2.
@pytest.mark.parametrize("dtype", sorted(set(UNIT_ROUNDOFF) - {"float8_e5m2fnuz"}))
def test_every_unit_is_half_the_distance_from_one_to_the_next_number(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    assert torch.finfo(getattr(torch, dtype)).eps / 2 == UNIT_ROUNDOFF[dtype]
    assert UNIT_ROUNDOFF["float8_e5m2fnuz"] == UNIT_ROUNDOFF["float8_e5m2"]


def test_an_output_is_held_against_what_came_in() -> None:
    floors = Floors()
    assert floors.activation("fc", ["float32"]) == rounding("float32")
    floors.saw(1e-3)
    assert floors.activation("head", ["float32"]) == rounding("float32") + GAIN * 1e-3


def test_a_short_dtype_on_the_way_stays_in_the_floor() -> None:
    floors = Floors()
    floors.activation("fc", ["float32", "bfloat16"])

    assert floors.activation("head", ["float32"]) == rounding("bfloat16")


def test_parameters_that_differ_raise_the_floor_of_their_module() -> None:
    floors = Floors(parameters=1e-6, own={"fc": 1e-3})

    assert floors.activation("fc", ["float32"]) == rounding("float32") + LATER_GAIN * 1e-3
    assert floors.activation("head", ["float32"]) == rounding("float32") + LATER_GAIN * 1e-6


def test_a_canceled_sum_is_as_uncertain_as_its_terms() -> None:
    assert Floors().gradient(1e5) == 0.0
    floors = Floors(precision=1e-6)
    assert floors.gradient(1e5) == pytest.approx(0.15)
    assert floors.gradient(0.5) == pytest.approx(1.5e-6)


def test_a_sum_over_many_rows_is_good_to_the_root_of_their_number() -> None:
    assert Floors().gradient(1.0, dtype="bfloat16", terms=1024.0) == 32 * 2.0**-8


def test_each_micro_batch_rounds_once_more_and_a_weight_may_be_used_many_times() -> None:
    floors = Floors()
    floors.activation("", ["bfloat16"])

    assert floors.gradient(1.0, dtype="bfloat16", accumulated=4) == (1.5 * 2 + 4) * 2.0**-8
    assert floors.gradient(1.0, dtype="float32", accumulated=4) == pytest.approx(1.5 * 2 * 2.0**-8, rel=1e-4)


def test_an_adaptive_update_follows_the_root_of_its_gradient() -> None:
    floors = Floors(gradients={"w": 1e-6})

    assert floors.update("w", "float64", adaptive=True, storage=1.0) == ADAPTIVE_GAIN * 1e-3
    assert floors.update("w", "float64", adaptive=False, storage=1.0) == GAIN * 1e-6


def test_an_update_is_stored_to_the_rounding_of_its_parameter() -> None:
    assert Floors().update("w", "float32", adaptive=False, storage=1e6) == pytest.approx(2 * 2.0**-24 * 1e6, rel=1e-5)


def test_updates_under_other_settings_have_no_floor() -> None:
    floors = Floors(settings_differ=True)

    assert floors.update("w", "float32", adaptive=False, storage=1.0) == math.inf
    assert floors.state("w", ["float32"]) == math.inf


def test_long_reductions_grow_with_the_root_of_their_length() -> None:
    assert Floors().scalar(10_000) == 100 * 2.0**-24


def test_nothing_is_measured_behind_what_has_no_size() -> None:
    floors = Floors()
    floors.saw(math.inf)

    assert floors.activation("head", ["float32"]) == math.inf


def _gated(open_gates: int, *, seed: int = 0) -> np.ndarray:
    values = random(1000, seed=seed)
    values[open_gates:] = 0.0
    return values


def _flipped(values: np.ndarray, flips: float) -> float:
    """What so many elements, of the mean square or in part as large as the largest, are of the whole."""
    squares = np.square(values, dtype=float)
    mean, most = squares.sum() / np.count_nonzero(values), squares.max()
    return math.sqrt((flips * mean + math.sqrt(flips) * most) / squares.sum())


@pytest.mark.parametrize("open_gates", [500, 499, 501, 498])
def test_gates_that_flip_are_allowed_their_whole_elements(open_gates: int) -> None:
    baseline, candidate = _gated(500), _gated(open_gates)
    apart = np.linalg.norm(candidate - baseline) / np.linalg.norm(baseline)

    floor = Floors().gated(summary_of(baseline), summary_of(candidate))

    assert floor == pytest.approx(_flipped(baseline, abs(open_gates - 500)))
    assert floor >= apart


def test_no_more_gates_are_allowed_to_flip_than_noise_can_turn() -> None:
    baseline = _gated(500)
    floor = Floors().gated(summary_of(baseline), summary_of(_gated(400)))

    assert floor == pytest.approx(_flipped(baseline, FEW_FLIPS), rel=1e-3)
    assert floor < 0.5 * np.linalg.norm(_gated(400) - baseline) / np.linalg.norm(baseline)


@pytest.mark.parametrize("came_in", ["flow", "parameters"])
@pytest.mark.parametrize(("size", "flips"), [(1e-7, 0), (0.99e-4, 0), (1e-4, 0.1), (1e-3, 1), (1e-1, 100)])
def test_the_more_came_in_the_more_gates_may_flip_without_changing_their_number(
    came_in: str, size: float, flips: float
) -> None:
    """Below a tenth of an element, that two flips hide each other is left to chance."""
    baseline, candidate = summary_of(_gated(500)), summary_of(_gated(500, seed=1))

    floor = Floors(**{came_in: size}).gated(baseline, candidate)

    assert floor == pytest.approx(_flipped(_gated(500), UNEVEN * flips))


@pytest.mark.parametrize(("size", "flips"), [(1e-7, 0), (1e-6, 0), (1e-5, 2)])
def test_two_gates_that_flip_show_in_two_elements_alone(size: float, flips: float) -> None:
    baseline = _gated(500)
    candidate = baseline + size * _gated(500, seed=1)
    candidate[3], candidate[700] = 0.0, baseline[3]

    floor = Floors(flow=size).gated(summary_of(baseline), summary_of(candidate))

    assert floor == pytest.approx(_flipped(baseline, flips))


@pytest.mark.parametrize(
    ("baseline", "candidate"), [(1000, 1000), (1000, 500), (500, 1000), (0, 500)], ids=lambda gates: f"{gates} open"
)
def test_a_tensor_without_zeros_or_of_zeros_only_has_no_gates(baseline: int, candidate: int) -> None:
    assert Floors(flow=0.1).gated(summary_of(_gated(baseline)), summary_of(_gated(candidate))) == 0.0


def test_gates_say_nothing_where_what_came_in_has_no_size() -> None:
    assert Floors(flow=math.inf).gated(summary_of(_gated(500)), summary_of(_gated(501))) == 0.0


U = 2.0**-24


@pytest.mark.parametrize(
    ("floors", "more", "expected"),
    [
        (Floors(), {}, 32 * U),
        (Floors(precision=0.02), {}, 0.02),
        (Floors(coefficients=0.02), {}, 0.02),
        (Floors(flow=0.02), {}, GAIN * 0.02),
        (Floors(parameters=0.02), {}, GAIN * 0.02),
        (Floors(gradients={"w": 0.02, "v": 0.5}), {}, GAIN * 0.02),
        (Floors(), {"left_over": 0.02}, GAIN * 0.02),
        (Floors(), {"storage": 1e4}, 2 * U * (1 + 1e4)),
        (Floors(), {"dtypes": ("float32", "bfloat16")}, 2 * 2.0**-8),
        (Floors(), {"dtypes": ("float64", "float32"), "storage": 1e4}, 2 * U * (1 + 1e4)),
    ],
)
def test_a_mere_factor_is_held_against_the_largest_that_may_bring_it(
    floors: Floors, more: dict[str, Any], expected: float
) -> None:
    given: dict[str, Any] = {"dtypes": ("float32", "float32"), "left_over": 0.0, "storage": 0.0, **more}

    assert floors.factor("w", **given) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("floors", "expected"),
    [
        (Floors(), 32 * U),
        (Floors(precision=0.02), 0.02),
        (Floors(coefficients=0.02), 0.02),
        (Floors(gradients={"w": 0.02, "v": 0.5}), GAIN * 0.02),
    ],
)
def test_an_optimizers_state_is_as_uncertain_as_the_gradients_so_far(floors: Floors, expected: float) -> None:
    assert floors.state("w", ["float32"]) == pytest.approx(expected)


def test_an_update_is_as_uncertain_as_the_state_that_it_is_made_of() -> None:
    floors = Floors()
    for path, size in (("w", 1e-3), ("w", 1e-4), ("v", 0.5)):
        floors.saw_state(path, size)

    assert floors.update("w", "float64", adaptive=True, storage=1.0) == GAIN * 1e-3
    assert Floors().update("w", "float32", adaptive=True, storage=1.0) == GAIN * rounding("float32")


def test_the_largest_difference_that_was_seen_of_a_gradient_counts() -> None:
    floors = Floors()
    for path, size in (("w", 1e-3), ("w", 1e-4), ("v", 0.5)):
        floors.saw_gradient(path, size)

    assert floors.gradients == {"w": 1e-3, "v": 0.5}


def test_noise_grows_from_site_to_site_without_a_finding(compared: Compared) -> None:
    def noisy(step: int, sites: Step) -> None:
        size = 1e-6
        for site in (FC, HEAD, ("backward", "", "head", "output[0]"), ("backward", "", "fc", "output[0]")):
            values = sites[site].values
            noise = random(*values.shape, seed=step)
            sites[site].values = values + np.float32(size * np.linalg.norm(values) / np.linalg.norm(noise)) * noise
            size *= 4

    assert compared(noisy).verdict == "equivalent"


def test_a_jump_above_what_came_in_is_a_finding(compared: Compared) -> None:
    def noisy(step: int, sites: Step) -> None:
        for site, size in ((FC, 1e-6), (HEAD, 1e-3)):
            values = sites[site].values
            noise = random(*values.shape, seed=step)
            sites[site].values = values + np.float32(size * np.linalg.norm(values) / np.linalg.norm(noise)) * noise

    first = compared(noisy).first_divergence
    assert first is not None
    assert first.path == "head"


def test_the_users_tolerances_replace_the_floors(compared: Compared) -> None:
    edit = at(FC, lambda x: x * np.float32(1.001))

    assert compared(edit).verdict == "diverged"
    assert compared(edit, rtol=0.002).verdict == "equivalent"
    assert compared(edit, rtol=0.0005).verdict == "diverged"
    assert compared(edit, atol=0.01).verdict == "equivalent"
    assert compared(edit, atol=1e-6).verdict == "diverged"
    assert compared(at(FC, lambda x: x * np.float32(1 + 1e-6)), rtol=0.0).verdict == "diverged"


def test_tolerances_do_not_excuse_another_batch(compared: Compared) -> None:
    assert compared(at(("batch", "", "", "input[0]"), lambda x: x + 1), rtol=1e9).verdict == "misaligned"


def test_a_gradient_is_as_uncertain_as_its_dtype_where_activations_were_not_recorded() -> None:
    assert Floors().gradient(1.0, dtype="float32") == pytest.approx(1.5 * 32 * 2.0**-24)


@pytest.mark.parametrize(("divisor", "verdict"), [("square_avg", "equivalent"), (None, "diverged")])
def test_a_momentum_of_what_was_divided_is_judged_like_an_update(
    divisor: str | None, verdict: str, compared: Compared
) -> None:
    state = ("optimizer", "", "head.weight", "momentum_buffer")

    def with_divisor(_step: int, sites: Step) -> None:
        momentum = sites.pop(state)
        if divisor:
            sites[(*state[:3], divisor)] = Seen(values=np.square(momentum.values))
        sites[state] = momentum

    def noisy(step: int, sites: Step) -> None:
        with_divisor(step, sites)
        for site, size in (("grad", "", "head.weight", "grad"), 1e-6), (state, 3e-5):
            noise = random(*sites[site].values.shape, seed=step)
            sites[site].values = sites[site].values * (1 + np.float32(size) * noise)

    assert compared(noisy, baseline_edit=with_divisor).verdict == verdict


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ((1e-6, 0.0), "equivalent"),
        ((1e-6, 0.9e-6), "equivalent"),
        ((1e-4, 0.0), "diverged"),
        ((1e-6, 3e-6), "diverged"),
        ((0.0, 0.9e-6), "diverged"),
    ],
)
def test_a_running_average_that_shrinks_has_the_error_of_what_it_was(
    errors: tuple[float, float], verdict: str, compared: Compared
) -> None:
    """Gradients that change sign cancel in it; their rounding does not, and most of it stays in the next step."""

    def averaged(apart: tuple[float, float]) -> Edit:
        def edit(step: int, sites: Step) -> None:
            average = [1.0, 1e-3, 1e-3][step] + (0.0, *apart)[step]
            sites["optimizer", "", "fc.bias", "momentum_buffer"].values = np.full(8, average, dtype=np.float32)

        return edit

    assert compared(averaged(errors), baseline_edit=averaged((0.0, 0.0))).verdict == verdict


def test_inverses_that_an_optimizer_keeps_are_judged_by_its_update(compared: Compared) -> None:
    """How far the inverse of a matrix is apart depends on its condition, which nothing tells."""
    state, update = ("optimizer", "", "fc.bias", "inverse"), ("param", "", "fc.bias", "value")

    def with_inverse(apart: float, moved: float = 0.0) -> Edit:
        def edit(step: int, sites: Step) -> None:
            sites[state] = Seen(values=random(8, 8, seed=step) + np.float32(apart))
            sites[update].values = sites[update].values * np.float32(1.0 + moved * (step == 2))

        return edit

    assert compared(with_inverse(0.1), baseline_edit=with_inverse(0.0)).verdict == "equivalent"
    found = compared(with_inverse(0.1, 0.1), baseline_edit=with_inverse(0.0)).first_divergence
    assert found is not None
    assert (found.phase, found.path) == ("update", "fc.bias")


@pytest.mark.parametrize("basis", [False, True])
def test_a_second_moment_beside_a_matrix_may_be_in_its_basis(compared: Compared, basis: bool) -> None:
    """As that of SOAP, in eigenvectors of the matrix: where eigenvalues are equal, rounding chooses these."""
    matrix, moment = ("optimizer", "", "fc.bias", "basis"), ("optimizer", "", "fc.bias", "second")

    def keeping(apart: float) -> Edit:
        def edit(step: int, sites: Step) -> None:
            sites[moment] = Seen(values=np.abs(random(6, seed=step)) + np.float32(apart))
            if basis:
                sites[matrix] = Seen(values=random(8, 8, seed=step) + np.float32(apart))

        return edit

    assert compared(keeping(0.1), baseline_edit=keeping(0.0)).verdict == ("equivalent" if basis else "diverged")


def test_inputs_and_parameters_that_differ_add_up_as_independent_errors() -> None:
    floors = Floors(parameters=3e-3)
    floors.saw(4e-3)

    assert floors.activation("head", ["float32"]) == pytest.approx(rounding("float32") + LATER_GAIN * 5e-3)
    assert floors.activation("head", ["bfloat16"]) == pytest.approx(rounding("bfloat16") + GAIN * 5e-3)


def test_a_module_without_parameters_may_be_given_what_the_one_around_it_computes_with_its_own() -> None:
    """The dropout inside a norm, for example, or behind an embedding of positions that the model owns."""
    floors = Floors(parameters=1e-6, own={"block.norm": 3e-3, "": 1e-3})

    assert floors.activation("block.norm.drop", ["float32"]) == pytest.approx(
        floors.activation("block.norm", ["float32"])
    )
    assert floors.activation("drop", ["float32"]) == pytest.approx(floors.activation("", ["float32"]))
    assert floors.activation("block.drop", ["float32"]) < 1e-4
    assert Floors(own={"norm": 3e-3, "norm.inner": 0.0}).owned("norm.inner") == 0.0


def test_a_parametrized_weight_belongs_to_the_module_that_computes_with_it() -> None:
    path = "fc.parametrizations.weight.original0"
    pair = Pair(baseline=_parameter(path, 1.0), candidate=_parameter(path, 1.001))

    found, _ = at_the_beginning({path: pair}, RunFloors())

    assert found.own == {"fc": pytest.approx(1e-3, rel=1e-3)}


def _parameter(path: str, value: float) -> MergedSite:
    summary = summary_of(np.full((8, 1), value, dtype=np.float32))
    return MergedSite(
        key=SiteKey("param", "", path, "value"), order=0, dtype="float32", shape=(8, 1), summary=summary, exact=True
    )


def test_an_update_without_its_gradient_is_held_against_what_the_gradient_could_be() -> None:
    floors = Floors()

    assert floors.update("fc", "float32", adaptive=False, storage=0.0, unseen=0.01) == pytest.approx(0.01)
    assert floors.update("fc", "float32", adaptive=True, storage=0.0, unseen=0.01) == pytest.approx(3.0)
    assert floors.update("fc", "float32", adaptive=False, storage=0.0) < 1e-4


def test_a_loss_of_an_unknown_batch_has_the_floor_of_one_sample(tmp_path: Path) -> None:
    """In float64, in which nothing else is as coarse as the float32 of kernels that sum."""

    def build(_step: int) -> Step:
        return {
            ("loss", "", "loss", "backward"): Seen(values=np.array(2.5)),
            ("param", "", "w", "value"): Seen(values=random(4, seed=0)),
        }

    found = compare(*(record(tmp_path / name, build=build) for name in "bc"))

    assert [one.floor for one in found.differences if one.phase == "loss"] == [2.0**-24]
