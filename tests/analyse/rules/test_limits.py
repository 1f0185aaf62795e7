"""Rules exactly at their limits: the number of steps, and the share, at which they begin to speak."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import Array, random
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.analyse.rules.batches import BatchesChange, SamplesDiffer, SamplesVary
from traindiff.analyse.rules.edits import OptimizersAloneChangeParameters
from traindiff.analyse.rules.layers import EvaluationIsCertain, UnitsAreSensitive, UnitsLive
from traindiff.analyse.rules.optimizers import EpsIsSmall, LearningRateIsSet, ScheduleIsFollowed, SecondMomentsHold
from traindiff.analyse.rules.ranges import FarFromUnderflow, FiniteThroughout
from traindiff.analyse.rules.rule import Rule, RunFacts
from traindiff.core.observation import EDITED
from traindiff.core.shards import Shard

GROUP = "optimizer.groups[0]"
FACTS = RunFacts(
    modules={"tanh": "Tanh", "sigmoid": "Sigmoid", "relu": "ReLU", "drop": "Dropout"},
    held_in={"fc.weight": frozenset({GROUP})},
)
Build = Callable[[int], Iterable[Part]]


def judged(
    rule: type[Rule], build: Build, *, steps: int = 1, limits: Mapping[str, float] | None = None
) -> list[Finding]:
    """What a rule finds in a run of made-up steps."""
    judge = rule(FACTS, limits=limits)
    found = []
    for step in range(steps):
        found += list(judge.step(step_table(list(build(step))), step=step) or ())
    return [*found, *judge.end()]


def setting(slot: str, value: float, *, order: int = 0) -> Part:
    return part(np.array(value), site=("optimizer", "", GROUP, slot), order=order)


def same_batch(_step: int) -> list[Part]:
    return [part(random(4, 6, seed=0), site=("batch", "", "", "input[0]"))]


def samples(*values: Array, slot: str = "input[0]") -> list[Part]:
    """The samples of one batch, beside the batch itself."""
    site = ("batch", "sample", "", slot)
    alone = [part(value, site=site, call=place, order=place + 1) for place, value in enumerate(values)]
    return [part(np.stack(values), site=("batch", "", "", slot)), *alone]


def copies(count: int, *, of: int, elements: int = 8) -> list[Part]:
    """So many of the samples are copies of the last one."""
    return samples(*(random(elements, seed=max(number, count)) for number in range(of)))


def constants(count: int, *, of: int) -> list[Part]:
    return samples(
        *(np.full(16, number, dtype=np.float32) if number < count else random(16, seed=number) for number in range(of))
    )


def subnormal(count: int, *, of: int = 64) -> list[Part]:
    values = random(of, seed=0)
    values[:count] = 1e-40
    return [part(values, site=("grad", "", "fc.weight", "grad"))]


def rate_of_0(_step: int) -> list[Part]:
    return [setting("lr", 0.0)]


def scheduled(rate: Callable[[int], float] = lambda _step: 0.1) -> Build:
    return lambda step: [setting("lr", rate(step)), setting("initial_lr", 0.5), setting("weight_decay", step)]


def saturated(path: str = "tanh", *, value: float = 1.0) -> list[Part]:
    return [part(np.full((4, 4), value, dtype=np.float32), site=("forward", "", path, "output[0]"))]


def dead(count: int, *, of: int = 256) -> list[Part]:
    values = 1 + np.square(random(4, of, seed=0))
    values[:, :count] = 0.0
    shard = Shard.of_batch((4, of), first=0)
    return [part(values, site=("forward", "", "relu", "output[0]"), shard=shard)]


def adam(second: float, *, eps: float = 1e-8, step: int = 100) -> list[Part]:
    """The state of one parameter, with gradients of size 1."""
    return [
        setting("eps", eps), setting("betas[1]", 0.5),
        part(np.array(float(step)), site=("optimizer", "", "fc.weight", "step")),
        part(np.ones(32, dtype=np.float32), site=("optimizer", "", "fc.weight", "exp_avg")),
        part(np.full(32, second, dtype=np.float32), site=("optimizer", "", "fc.weight", "exp_avg_sq")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "build", "steps"),
    [
        (SamplesVary, lambda _: constants(3, of=4), 3),
        (SamplesDiffer, lambda _: copies(5, of=8), 3),
        (FarFromUnderflow, lambda _: subnormal(33), 3),
        (SecondMomentsHold, lambda _: adam(0.0), 5),
        (LearningRateIsSet, rate_of_0, 10),
        (EpsIsSmall, lambda _: adam(1e-4, eps=0.1), 10),
        (UnitsAreSensitive, lambda _: saturated(), 10),
        (UnitsLive, lambda _: dead(144), 10),
    ],
    ids=lambda value: value.name if isinstance(value, type) else None,
)
def test_what_lasts_for_as_many_steps_as_a_rule_waits_for_is_found_and_what_is_shorter_is_not(
    rule: type[Rule], build: Build, steps: int
) -> None:
    """The numbers are those that docs/rules.md promises."""
    assert judged(rule, build, steps=steps - 1) == []
    (finding,) = judged(rule, build, steps=steps)
    assert (finding.step, finding.evidence["num_steps"]) == (0, steps)


def test_a_batch_repeats_the_one_before_from_the_second_step_on() -> None:
    assert judged(BatchesChange, same_batch, steps=3) == []
    (finding,) = judged(BatchesChange, same_batch, steps=4)
    assert (finding.step, finding.evidence["num_steps"]) == (1, 3)


def test_a_fault_that_stops_in_between_is_counted_from_its_beginning_again() -> None:
    assert judged(LearningRateIsSet, lambda step: [setting("lr", 0.1 * (step == 9))], steps=19) == []
    (finding,) = judged(LearningRateIsSet, lambda step: [setting("lr", 0.1 * (step == 9))], steps=20)
    assert (finding.step, finding.evidence["num_steps"]) == (10, 10)


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        (SamplesVary, constants(2, of=4), constants(3, of=4)),
        (SamplesDiffer, copies(4, of=8), copies(5, of=8)),
        (SamplesDiffer, copies(6, of=7), copies(7, of=8)),  # too few samples
        (SamplesDiffer, copies(5, of=8, elements=7), copies(5, of=8)),  # too short
        (FarFromUnderflow, subnormal(32), subnormal(33)),
        (FarFromUnderflow, subnormal(63, of=63), subnormal(64, of=64)),  # too few elements
        (UnitsLive, dead(128), dead(144)),
        (UnitsAreSensitive, saturated(value=0.994), saturated(value=0.996)),  # 1 - y^2 is 0.012, and 0.008
        (UnitsAreSensitive, saturated("sigmoid", value=0.997), saturated("sigmoid", value=0.998)),  # 4 y (1 - y)
        (EpsIsSmall, adam(0.01, eps=0.099), adam(0.01, eps=0.101)),
        (EpsIsSmall, adam(0.005, eps=0.099, step=1), adam(0.005, eps=0.101, step=1)),  # 0.005 / (1 - 0.5)
    ],
)
def test_a_rule_speaks_beyond_its_limit_and_not_at_it(rule: type[Rule], right: list[Part], wrong: list[Part]) -> None:
    assert judged(rule, lambda _: right, steps=10) == []
    assert len(judged(rule, lambda _: wrong, steps=10)) == 1


# The learning rate.


def test_a_scheduled_learning_rate_that_stays_is_found_with_its_number_of_steps() -> None:
    """Other settings of the group may change; they are not the learning rate."""
    (finding,) = judged(ScheduleIsFollowed, scheduled(), steps=5, limits={"least_steps": 5})

    assert finding.evidence == {"learning_rate": 0.1, "num_steps": 5}
    assert f"The learning rate of {GROUP} is 0.1 in all of 5 steps" in finding.message


@pytest.mark.parametrize("moved", [1, 4])
def test_a_learning_rate_that_moved_once_follows_its_schedule(moved: int) -> None:
    build = scheduled(lambda step: 0.2 if step == moved else 0.1)

    assert judged(ScheduleIsFollowed, build, steps=5, limits={"least_steps": 1}) == []


def test_a_learning_rate_may_stay_for_199_steps_because_schedules_by_epoch_wait_for_long() -> None:
    judge, table = ScheduleIsFollowed(FACTS), step_table(list(scheduled()(0)))
    for step in range(199):
        judge.step(table, step=step)
    assert list(judge.end()) == []

    judge.step(table, step=199)

    assert [one.evidence["num_steps"] for one in judge.end()] == [200]


def test_a_learning_rate_without_a_schedule_may_stay() -> None:
    assert judged(ScheduleIsFollowed, lambda _: [setting("lr", 0.1)], steps=5, limits={"least_steps": 1}) == []


# Parameters that something else changed.


def edited(*paths: str, ranks: Iterable[int] = (0,)) -> list[Part]:
    values = random(4, seed=0)
    return [part(values, rank=rank, site=("param", EDITED, path, "value")) for path in paths for rank in ranks]


def test_parameters_that_something_else_changed_are_named_with_the_steps_around_the_change() -> None:
    judge = OptimizersAloneChangeParameters(FACTS)

    (finding,) = judge.step(step_table(edited("a", "b", "c", "d", "e")), step=7)

    assert (
        finding.message
        == "a, b, c and 2 more parameters changed between step 6 and step 7, not by the optimizer's step."
    )
    assert finding.evidence == {"paths": ["a", "b", "c", "d", "e"]}
    assert (finding.kind, finding.step, finding.path, finding.rank) == ("edited", 7, "a", 0)
    assert list(judge.step(step_table(edited("b", "e")), step=8)) == []  # they are known
    (later,) = judge.step(step_table(edited("b", "f")), step=9)
    assert later.message == "f changed between step 8 and step 9, not by the optimizer's step."


def test_ranks_that_changed_parameters_are_named_if_others_did_not() -> None:
    others = [part(random(4, seed=0), rank=rank, site=("forward", "", "x", "output[0]")) for rank in range(3)]

    (some,) = judged(OptimizersAloneChangeParameters, lambda _: [*others, *edited("a", ranks=(1, 2))])
    (every,) = judged(OptimizersAloneChangeParameters, lambda _: [*others, *edited("a", ranks=range(3))])

    assert some.message.startswith("a changed on ranks 1 and 2 in step 0 or before it")
    assert every.message.startswith("a changed in step 0 or before it")


# Dropout.


def dropped(zeros: int, negative: int, *, of: int = 400, seed: int = 0) -> Array:
    """So many numbers are 0, and so many of the others are below 0."""
    values = np.abs(random(of, seed=seed)) + np.float32(0.1)
    values[:zeros] = 0.0
    values[zeros : zeros + negative] *= -1
    return values


def evaluated(training: Array, evaluation: Array) -> list[Part]:
    return [
        part(values, site=("forward", stage, "drop", "output[0]"), order=order)
        for order, (stage, values) in enumerate((("", training), ("evaluation", evaluation)))
    ]


@pytest.mark.parametrize(
    ("zeros", "negative", "found"),
    [
        (200, 100, True),
        (200, 11, True),
        (200, 10, False),  # exactly 5 % of what is not 0
        (200, 189, True),
        (200, 190, False),  # exactly 95 %
        (400, 0, False),  # nothing but zeros
        (4, 100, True),
        (3, 100, False),  # less than 1 % of zeros
        (396, 2, True),
        (397, 1, False),
        (0, 200, False),
    ],
)
def test_zeros_among_numbers_of_both_signs_are_put_down_to_dropout(zeros: int, negative: int, found: bool) -> None:
    training, evaluation = (dropped(zeros, negative, seed=seed) for seed in (1, 2))

    assert len(judged(EvaluationIsCertain, lambda _: evaluated(training, evaluation))) == found


@pytest.mark.parametrize(("count", "found"), [(256, 1), (255, 0)])
def test_of_few_numbers_a_share_of_zeros_says_little(count: int, found: int) -> None:
    training, evaluation = (dropped(100, 50, of=count, seed=seed) for seed in (1, 2))

    assert len(judged(EvaluationIsCertain, lambda _: evaluated(training, evaluation))) == found


def test_another_share_of_zeros_than_in_training_is_no_dropout() -> None:
    """Chance moves the share of 400 by 0.025; 6 deviations of a difference are 0.21."""
    training = dropped(200, 100, seed=1)

    for zeros, found in ((120, 1), (110, 0), (280, 1), (290, 0)):
        assert len(judged(EvaluationIsCertain, lambda _, zeros=zeros: evaluated(training, dropped(zeros, 50)))) == found


# NaN and infinities.


def batch(slot: str, values: list[float], *, rank: int = 0, **about: object) -> Part:
    return part(np.array(values, dtype=np.float32), rank=rank, site=("batch", "", "", slot), **about)


@pytest.mark.parametrize(
    ("slot", "values", "right"),
    [
        ("input.attention_mask", [1.0, -np.inf], True),
        ("input[0]", [0.0, -np.inf], True),
        ("input[0]", [1.0, -np.inf], False),
        ("input[0]", [1.0, 0.0, -np.inf], False),
        ("input[0]", [-1.0, 0.0, -np.inf], False),
        ("input.attention_mask", [1.0, np.inf], False),
        ("input.attention_mask", [1.0, np.nan], False),
        ("input[0]", [0.0, np.inf], False),
    ],
)
def test_only_minus_infinity_among_zeros_or_in_a_mask_is_right_in_a_batch(
    slot: str, values: list[float], right: bool
) -> None:
    found = judged(FiniteThroughout, lambda _: [batch(slot, values)])

    assert [one.kind for one in found] == ([] if right else ["non-finite"])


def test_nothing_is_said_of_what_was_observed_before_the_first_site() -> None:
    (finding,) = judged(FiniteThroughout, lambda _: [batch("input[0]", [1.0, np.nan, np.inf])])

    assert "has 1 NaN and 1 infinite of 3 elements, and nothing was observed before it in the step." in finding.message
    assert finding.evidence == {"nan": 1, "infinite": 1, "elements": 3, "largest_before": 0.0}
    assert finding.rank is None


def test_the_largest_number_before_it_is_that_of_the_last_finite_tensor() -> None:
    other = part(np.array([-7.0, 3.0]), site=("batch", "", "", "input[0]"))
    wrong = part(np.array([np.nan, 3.0]), site=("forward", "", "fc", "output[0]"), order=1)

    (finding,) = judged(FiniteThroughout, lambda _: [other, wrong])

    assert "up to batch (root) input[0] (largest magnitude 7)." in finding.message
    assert finding.evidence["largest_before"] == 7.0


def test_the_rank_is_named_where_several_ranks_hold_a_part() -> None:
    rows = [
        batch("input[0]", [1.0, value], rank=rank, shard=Shard.of_batch((2,), first=2 * rank))
        for rank, value in enumerate((2.0, np.nan))
    ]

    (finding,) = judged(FiniteThroughout, lambda _: rows)

    assert (finding.rank, finding.micro_step) == (1, 0)
