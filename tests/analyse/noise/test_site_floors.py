"""The floor of each site, as a step goes on: from rounding, from what was seen before it, and from replicas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tests.made_up import Array, random, summary_of
from traindiff.analyse.merge.distance import Pair, size_of
from traindiff.analyse.merge.site import MergedSite, SiteKey
from traindiff.analyse.noise.measured import SAFETY, Calibration, NoiseRecording, StepNoise
from traindiff.analyse.noise.moments import HANDED_ON, SCATTER
from traindiff.analyse.noise.run_floors import RunFloors, is_quotient
from traindiff.analyse.noise.site_floors import SiteFloors
from traindiff.analyse.noise.uncalibrated import ADAPTIVE_GAIN, GAIN, LATER_GAIN
from traindiff.core.summary import rounding

U = 2.0**-24
X = random(8, 6, seed=0)
Y = random(8, 6, seed=1)
SIZE = float(np.linalg.norm(X.astype(float)))
SPREAD = 1 + 4 / math.sqrt(48)
"""By how much the distances of a few replicas may be too small, of 48 elements."""

SLOTS = {"forward": "output[0]", "backward": "output[0]", "loss": "backward", "param": "value", "update": "update"}


def site(
    baseline: Array, candidate: Array | None = None, *, phase: str = "forward", path: str = "fc", slot: str = "",
    stage: str = "", exact: bool = True,
) -> Pair:  # fmt: skip
    key = SiteKey(phase, stage, path, slot or SLOTS.get(phase, "grad"), 0, 0)
    left, right = (
        MergedSite(
            key=key, order=0, dtype=values.dtype.name, shape=values.shape, summary=summary_of(values),
            exact=exact or values is baseline,
        )
        for values in (baseline, baseline.copy() if candidate is None else candidate)
    )  # fmt: skip
    return Pair(baseline=left, candidate=right)


def moved(values: Array, size: float) -> Array:
    """The values, one of them further by `size`."""
    found = values.astype(np.float64)
    found.reshape(-1)[5] += size
    return found.astype(values.dtype)


def parameter(values: Array, candidate: Array | None = None) -> Pair:
    return site(values, candidate, phase="param", stage="before")


def step(run: RunFloors | None = None, **given: Any) -> SiteFloors:
    about: dict[str, Any] = {
        "parameters": {}, "pairs": (), "samples": 1, "micro_steps": 1, "noise": None, "calibration": Calibration(),
        **given,
    }  # fmt: skip
    if about["noise"] is not None:
        about["noise"] = StepNoise(sizes=about["noise"], moments=about.pop("moments", {}))
    return SiteFloors(run or RunFloors(), **about)


def replicas(**constants: float) -> Calibration:
    two = tuple(NoiseRecording(path=path, replica="ulp:1", differs=True) for path in "ab")
    return Calibration(recordings=two, constants=constants)


# What was seen before.


def test_the_difference_of_a_bias_is_added_to_an_output_that_may_be_smaller() -> None:
    """An adaptive step turns signs in a bias whose gradient is only noise; the weights are far larger."""
    bias, weight, apart = random(6, seed=2), 100 * random(6, 6, seed=3), np.float32(1e-3) * random(6, seed=4)
    parameters = {
        "fc.bias": site(bias, bias + apart, phase="param", path="fc.bias"),
        "fc.weight": site(weight, phase="param", path="fc.weight"),
    }
    small = np.float32(1e-2) * X
    output = site(small, small + apart)

    assert size_of(output) <= step(parameters=parameters).of(output) < 4 * size_of(output)
    assert step(parameters=parameters).of(site(small, path="other")) < 0.01 * size_of(output)
    run = RunFloors(disturbed={"fc.bias"})
    floors = step(run, parameters=parameters)
    assert floors.undisturbed(output) < 0.01 * floors.of(output)


@pytest.mark.parametrize(
    ("phase", "stage", "counts"),
    [
        ("forward", "", True),
        ("backward", "", True),
        ("loss", "", True),
        ("grad", "", True),
        ("grad", "reduced", False),
        ("optimizer", "", False),
        ("update", "", False),
        ("param", "", False),
    ],
)
def test_what_differs_on_the_way_of_the_data_raises_the_floors_behind_it(phase: str, stage: str, counts: bool) -> None:
    floors = step()

    floors.saw(site(X, phase=phase, stage=stage), 1e-3)

    assert floors.inputs_differ == counts
    assert floors.of(site(Y, path="head")) == rounding("float32") + (GAIN * 1e-3 if counts else 0)


def test_parameters_that_differ_count_where_they_are_used_and_together_everywhere() -> None:
    parameters = {
        "fc.weight": parameter(X, moved(X, 0.3)),
        "fc.scale": parameter(Y, moved(Y, 0.4)),
        "head.weight": parameter(random(90, seed=2)),
    }
    squares = [float(np.square(one.astype(float)).sum()) for one in (X, Y, random(90, seed=2))]

    floors = step(parameters=parameters)

    assert floors.inputs_differ
    own = LATER_GAIN * 0.5 / math.sqrt(squares[0] + squares[1])
    assert floors.of(site(X, path="fc")) == pytest.approx(own, rel=1e-5)
    assert floors.of(site(X, path="head")) == pytest.approx(LATER_GAIN * 0.5 / math.sqrt(sum(squares)), rel=1e-5)


def test_parameters_with_equal_bits_or_of_zeros_bring_in_nothing() -> None:
    assert not step(parameters={"fc.weight": parameter(X), "fc.bias": parameter(X * 0)}).inputs_differ


def test_each_operation_of_a_forced_run_is_judged_as_if_its_inputs_agreed() -> None:
    floors = step(forced=True, parameters={"fc.weight": parameter(X, moved(X, 0.3))})

    floors.saw(site(X), 1e-3)

    assert floors.of(site(Y)) == rounding("float32")


@pytest.mark.parametrize(("size", "rows", "turned"), [(1e-4, 999, 0.0), (1e-4, 1000, 1.0), (1e-2, 1000, GAIN * 10)])
def test_a_choice_turns_as_many_rows_as_lie_within_what_came_in(size: float, rows: int, turned: float) -> None:
    floors = step()

    floors.saw(site(X), size)

    assert floors.turned_rows(rows) == pytest.approx(turned)


# Numbers, parameters and updates.


@pytest.mark.parametrize(("phase", "slot"), [("loss", "backward"), ("grad", "norm")])
def test_a_number_is_reduced_from_the_whole_batch(phase: str, slot: str) -> None:
    assert step(samples=10_000).of(site(np.array(1.0), phase=phase, slot=slot)) == 100 * U


def test_a_count_of_steps_is_equal_or_wrong() -> None:
    assert step().of(site(np.array(3.0), phase="optimizer", slot="step")) == 0.0


def test_an_update_is_stored_to_the_rounding_of_its_parameter() -> None:
    floors = step(parameters={"fc.weight": parameter(X)})

    def storage(baseline: Array, candidate: Array, path: str = "fc.weight", phase: str = "update") -> float:
        return floors.storage(site(baseline, candidate, path=path, phase=phase))

    assert storage(X / 1000, X / 1000) == pytest.approx(1000, rel=1e-5)
    assert storage(X / 1000, X / 1000, path="head.weight") == 0.0
    assert storage(X / 1000, X / 1000, phase="optimizer") == 0.0
    nothing = np.zeros_like(X)
    assert storage(nothing, moved(nothing, 1.9 * U * SIZE)) == math.inf  # lost to rounding in the baseline
    assert storage(nothing, moved(nothing, 2.1 * U * SIZE)) == 0.0


@pytest.mark.parametrize(
    ("slot", "floor"), [("momentum_buffer", GAIN * 1e-5), ("exp_avg_sq", ADAPTIVE_GAIN * math.sqrt(1e-5))]
)
def test_an_update_follows_the_root_of_its_gradient_once_a_moment_was_seen(slot: str, floor: float) -> None:
    floors = step(RunFloors(gradients={"fc.weight": 1e-5}))

    floors.of(site(X, phase="optimizer", path="fc.weight", slot=slot))

    assert floors.of(site(X, phase="update", path="fc.weight")) == pytest.approx(floor)
    assert floors.of(site(X, phase="update", path="head.weight")) == pytest.approx(GAIN * rounding("float32"))


@pytest.mark.parametrize("forced", [False, True])
def test_an_adaptive_update_of_noise_may_go_the_other_way_whole(forced: bool) -> None:
    gradient = random(96, seed=1)
    gradient[32:64] *= np.float32(1e-8)  # the key's third of a joint bias
    floors = step(RunFloors(adaptive={"fc.bias"}), forced=forced)

    floors.saw(site(gradient, phase="grad", path="fc.bias"), 0.0)

    floor = floors.of(site(gradient, phase="update", path="fc.bias"))
    assert floor == pytest.approx(GAIN * rounding("float32") if forced else 2 * math.sqrt(1 / 3))


# Replicas.

HERE = site(X).baseline.key


def test_a_floor_is_a_multiple_of_what_the_farthest_replica_shows() -> None:
    floors = step(noise={HERE: (1e-4, 1e-3)}, calibration=replicas(forward=3.0))

    assert floors.of(site(X)) == pytest.approx(SAFETY * 3.0 * SPREAD * 1e-3)
    assert floors.of(site(X, path="head")) == rounding("float32")


def test_as_much_less_is_allowed_as_inputs_agree_better_than_those_of_replicas() -> None:
    before = site(X, path="embedding")
    floors = step(noise={before.baseline.key: (1e-3, 0.0), HERE: (1e-3, 0.0)}, calibration=replicas(forward=3.0))

    floors.saw(before, 1e-4)

    assert floors.of(site(X)) == pytest.approx(SAFETY * 3.0 * SPREAD * 1e-3 / 10)


@pytest.mark.parametrize(("count", "floor"), [(16, SAFETY * 2.0 * 1e-3), (15, GAIN * 1e-2)])
def test_of_a_handful_of_numbers_replicas_cannot_tell(count: int, floor: float) -> None:
    floors = step(noise={HERE: (1e-3, 1e-3)}, calibration=replicas(forward=1.0))

    floors.saw(site(X, path="embedding"), 1e-2)  # no replica has that

    assert floors.of(site(random(count, seed=3))) == pytest.approx(floor, rel=1e-4)


@pytest.mark.parametrize(("sizes", "floor"), [((0.0, 0.0), SAFETY * SPREAD * 2.0**-24), ((0.0,), GAIN * 1e-2)])
def test_what_one_replica_alone_computes_it_may_compute_with_the_same_bits(
    sizes: tuple[float, ...], floor: float
) -> None:
    floors = step(noise={HERE: sizes}, calibration=replicas(forward=1.0))

    floors.saw(site(X, path="embedding"), 1e-2)

    assert floors.of(site(X)) == pytest.approx(floor, rel=1e-4)


@pytest.mark.parametrize(("size", "exceeded_noise"), [(1e-3, False), (1e-1, True)])
def test_once_the_runs_have_parted_inputs_have_the_last_word(size: float, exceeded_noise: bool) -> None:
    run = RunFloors()
    before = site(X, path="embedding")
    floors = step(run, noise={before.baseline.key: (1e-3, 0.0), HERE: (1e-3, 0.0)}, calibration=replicas(forward=1.0))

    floors.saw(before, size)

    assert run.exceeded_noise == exceeded_noise
    assert floors.of(site(X)) == pytest.approx(GAIN * size if exceeded_noise else SAFETY * SPREAD * 1e-3, rel=1e-4)


def test_replicas_say_nothing_of_states_under_other_settings() -> None:
    state = site(X, phase="optimizer", path="fc.weight", slot="momentum_buffer")
    floors = step(RunFloors(settings_differ=True), noise={state.baseline.key: (1e-3,)}, calibration=replicas())

    assert floors.of(state) == math.inf


def test_of_an_optimizer_that_mixes_all_gradients_replicas_show_a_few_draws() -> None:
    update = site(X, phase="update", path="fc.weight")
    noise, floors = {update.baseline.key: (1e-6, 1e-6)}, {}
    for mixing in (False, True):
        run = RunFloors(mixing=mixing, learning_apart=1e-3)
        floors[mixing] = step(run, noise=noise, calibration=replicas()).of(update)

    assert floors[False] < 1e-5
    assert floors[True] >= GAIN * 1e-3


@pytest.mark.parametrize(("slot", "power"), [("exp_avg", 1), ("exp_avg_sq", 2)])
def test_a_state_is_at_least_as_uncertain_as_the_gradient_that_enters_it(slot: str, power: int) -> None:
    gradient = site(X, phase="grad", path="fc.weight")
    state = site(X, phase="optimizer", path="fc.weight", slot=slot)
    noise = {gradient.baseline.key: (1e-2,), state.baseline.key: (1e-5,)}
    floors = step(noise=noise, calibration=replicas())

    entering = floors.measured(gradient)

    assert entering == pytest.approx(SAFETY * SPREAD * 1e-2)
    assert floors.measured(state) == pytest.approx((1 + entering) ** power - 1)


@pytest.mark.parametrize(
    ("phase", "forced", "inside"), [("backward", True, 1), ("backward", False, 0), ("loss", True, 0)]
)
def test_forced_replicas_do_not_show_the_shorter_dtype_that_a_gradient_was_computed_in(
    phase: str, forced: bool, inside: int
) -> None:
    after = site(X, phase=phase)
    floors = step(noise={after.baseline.key: (1e-6,)}, calibration=replicas(), forced=forced)

    floors.of(site(X.astype(np.float16), path="embedding"))

    shown = max(1e-6, inside * 2.0**-11)
    assert floors.measured(after) == pytest.approx(SAFETY * SPREAD * shown)


# What was learned.


@pytest.mark.parametrize(
    ("phase", "stage", "slot", "learned"),
    [
        ("loss", "", "", True),
        ("grad", "", "", True),
        ("update", "", "", True),
        ("param", "", "buffer", True),
        ("grad", "", "norm", False),
        ("param", "", "value", False),
        ("grad", "reduced", "", False),
        ("forward", "", "", False),
        ("optimizer", "", "exp_avg", False),
    ],
)
def test_learning_differs_where_a_loss_a_gradient_or_an_update_does(
    phase: str, stage: str, slot: str, learned: bool
) -> None:
    small, large = RunFloors(), RunFloors()

    step(small).saw(site(X, phase=phase, stage=stage, slot=slot), 1e-8)
    step(large).saw(site(X, phase=phase, stage=stage, slot=slot), 0.5)

    assert not small.learning_differs
    assert large.learning_differs == learned


@pytest.mark.parametrize(
    ("factor", "exact", "differs"), [(1.0, True, False), (1.1, True, True), (1.4, False, False), (1.6, False, True)]
)
def test_of_a_permuted_parameter_norms_are_held_against_each_other(factor: float, exact: bool, differs: bool) -> None:
    run = RunFloors(permuted={"fc.weight"})
    gradient = site(X, X[::-1] * np.float32(factor), phase="grad", path="fc.weight", exact=exact)

    step(run).saw(gradient, 1.5)

    assert run.learning_differs == differs


def test_how_far_learning_is_apart_is_measured_over_all_gradients_of_a_step() -> None:
    run = RunFloors()
    other = float(np.linalg.norm(Y.astype(float)))
    for size in (0.3, 0.1):
        floors = step(run)
        floors.saw(site(X, phase="grad", path="fc.weight"), size)
        floors.saw(site(Y, phase="grad", path="head.weight"), 0.0)
        floors.saw(site(Y, phase="grad", path="head.weight", stage="reduced"), 5.0)
        floors.saw(site(Y, phase="grad", path="odd.weight"), math.inf)
        floors.finish()

    assert run.learning_apart == pytest.approx(0.3 * SIZE / math.hypot(SIZE, other), rel=1e-5)


# What BatchNorm computes from the mean and the variance over all rows.

WIDE = random(64, 6, 16, 16, seed=3)
ROWS = 64 * 16 * 16


def batch_norm() -> list[Pair]:
    return [
        site(WIDE, path="bn", phase="backward"),
        site(X[0], path="bn.running_mean", phase="param", slot="buffer"),
    ]


def test_what_batch_norm_averages_may_be_off_by_the_root_of_its_rows() -> None:
    floors = step(pairs=batch_norm())

    assert floors.of(site(WIDE, path="bn")) == pytest.approx(SAFETY * math.sqrt(ROWS) * U)
    assert floors.of(site(X[0], path="bn.running_mean", phase="param", slot="buffer")) >= math.sqrt(ROWS) * U
    assert floors.of(site(WIDE, path="conv")) == rounding("float32")


def test_replicas_that_add_up_alike_do_not_hold_batch_norm_to_their_own_noise() -> None:
    """Channels last, torch's BatchNorm on the CPU is up to 0.8 sqrt(rows) u off, and its usual kernel 0.7 u."""
    apart = math.sqrt(ROWS) * U
    noise = {SiteKey("forward", "", path, "output[0]"): (U, U) for path in ("bn", "relu")}
    run = RunFloors()
    floors = step(run, pairs=batch_norm(), noise=noise, calibration=replicas())

    pair = site(WIDE, path="bn")
    assert floors.of(pair) >= apart
    floors.saw(pair, apart)

    assert run.exceeded_noise
    assert floors.of(site(WIDE, path="relu")) == pytest.approx(rounding("float32") + GAIN * apart)
    assert not run.learning_differs


def test_running_statistics_of_rounded_activations_are_as_good_as_those() -> None:
    """Autocast rounds a weight alike in every replica: only the candidate, which does not, shows how far it is off."""
    buffer = site(X[0], path="bn.running_mean", phase="param", slot="buffer")
    floors = step(noise={buffer.baseline.key: (1e-5, 2e-5)}, calibration=replicas())
    exact = floors.measured(buffer)
    floors.of(site(Y.astype(np.float16)))

    assert exact is not None
    assert exact < 2.0**-11 < (floors.measured(buffer) or 0.0)


@pytest.mark.parametrize(
    ("phase", "path", "slot", "quotient"),
    [
        ("update", "fc.weight", "update", True),
        ("param", "fc.weight", "value", True),
        ("optimizer", "fc.weight", "momentum_buffer", True),
        ("optimizer", "fc.weight", "acc_delta", True),
        ("optimizer", "fc.weight", "exp_avg_sq", False),
        ("grad", "fc.weight", "grad", False),
        ("grad", "fc.weight", "momentum_buffer", False),
        ("update", "head.weight", "update", False),
    ],
)
def test_what_an_adaptive_optimizer_divided_by_a_moment(phase: str, path: str, slot: str, quotient: bool) -> None:
    assert is_quotient(SiteKey(phase, "", path, slot), {"fc.weight"}) == quotient


HALF = random(64, 64, seed=0, dtype="float16")
HALF_HERE = site(HALF).baseline.key


def test_a_norm_may_move_as_far_as_those_of_replicas_do() -> None:
    floors = step(noise={}, moments={HALF_HERE: 1e-2}, calibration=replicas(forward=3.0))

    assert floors.norm_limit(site(HALF), 1e-3) == pytest.approx(SAFETY * 3.0 * 1e-2)
    assert floors.norm_limit(site(HALF, path="head"), 1e-3) == pytest.approx(step().norm_limit(site(HALF), 1e-3))


def test_a_norm_moves_with_what_was_handed_on() -> None:
    floors, pair = step(), site(HALF, HALF * np.float16(1.25), path="embedding")
    before = floors.norm_limit(site(HALF), 0.0)
    assert before is not None

    floors.saw(pair, 0.25)

    after = floors.norm_limit(site(HALF), 0.0)
    assert after is not None
    assert after - before == pytest.approx(HANDED_ON * 0.25, rel=1e-3)


@pytest.mark.parametrize(
    ("pair", "floor"),
    [
        (site(HALF.astype(np.float32)), 1e-3),  # kernels leave errors with a direction that are as large
        (site(HALF), math.inf),
        (site(HALF[:1, :8]), 1e-3),  # too few elements
        (site(HALF, phase="update"), 1e-3),
        (site(HALF, phase="grad", stage="reduced"), 1e-3),
        (site(HALF, phase="param"), 1e-3),
    ],
    ids=["float32", "no floor", "few", "an update", "a stage of a gradient", "a parameter"],
)
def test_of_other_sites_no_norm_is_judged(pair: Pair, floor: float) -> None:
    assert step().norm_limit(pair, floor) is None


def test_how_far_a_norm_moves_follows_from_the_floor_in_units_of_its_dtype() -> None:
    u = 2.0**-11

    small, large = (step().norm_limit(site(HALF), floor) for floor in (u / 2, 4 * u))

    assert small is not None
    assert large == pytest.approx(4 * small)
    assert small > SCATTER * u / 64  # as if all elements were of one size and independent
