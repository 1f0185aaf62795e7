"""Two sides in one process: what passes, what is found, and how."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.sharding.training import Model
from tests.run.lockstep.sides import Side, altered, batches, lines, loss_of, overwriting, plain, scaled, stepped

TOLERANCES = {"param_tol": 1e-5, "loss_tol": 1e-5, "grad_tol": 1e-5}


@pytest.mark.parametrize("tolerances", [{}, TOLERANCES])
def test_the_same_training_passes_to_the_bit(tolerances: dict[str, float]) -> None:
    comparison, printed = stepped(plain(), plain(), **tolerances)

    assert (comparison.verdict, comparison.exit_code) == ("identical", 0)
    assert printed.endswith("TEST PASSED\n")
    assert comparison.calibrated is not bool(tolerances)


@pytest.mark.parametrize("tolerances", [{}, TOLERANCES])
def test_a_candidate_that_does_not_learn_is_found_in_batch_0(tolerances: dict[str, float]) -> None:
    comparison, printed = stepped(plain(), plain(lr=0.0), **tolerances)

    assert comparison.verdict == "diverged"
    assert "SETTING DIFFERS name=lr baseline=0.01 candidate=0 parameters=16\n" in printed
    first = next(lines(printed))
    assert first.startswith("DIVERGED PARAMETER rank=0 batch=0 param_idx=0 name=embed.weight abs_diff=1.9")
    assert printed.endswith("TEST FAILED\n")
    assert len(list(lines(printed, "STATUS"))) == 1, "it ends where the sides part"


@pytest.mark.parametrize("tolerances", [{}, TOLERANCES])
def test_all_gradients_times_1_5_are_found_as_gradients_in_batch_0(tolerances: dict[str, float]) -> None:
    comparison, printed = stepped(plain(), altered(plain(), scaled(1.5)), **tolerances)

    first = comparison.first_divergence
    assert first is not None
    assert (first.phase, first.step) == ("grad", 0)
    assert next(lines(printed)).startswith("DIVERGED GRADIENT rank=0 batch=0 grad_idx=0 name=embed.weight ")
    assert "1.5 x the baseline's" in printed


def into_nan(model: nn.Module, number: int) -> None:
    if number == 1:
        model.head.weight.grad[0, 0] = float("nan")


@pytest.mark.parametrize("tolerances", [{}, TOLERANCES])
@pytest.mark.parametrize("both", [False, True])
def test_nan_fails_also_where_both_sides_have_it(both: bool, tolerances: dict[str, float]) -> None:
    baseline = altered(plain(), into_nan) if both else plain()
    comparison, printed = stepped(baseline, altered(plain(), into_nan), **tolerances)

    assert comparison.verdict == "diverged", str(comparison)
    first = next(lines(printed))
    assert first.startswith("DIVERGED GRADIENT rank=0 batch=1 grad_idx=15 name=head.weight abs_diff=nan rel_diff=nan ")
    if both:
        assert "1 of 304 elements is NaN or infinite, at the same places in both runs." in printed


def test_a_difference_below_the_tolerance_passes_and_one_above_fails() -> None:
    def nudge(model: nn.Module, _number: int) -> None:
        model.head.weight.grad *= 1.001

    far = {"param_tol": 0.5, "loss_tol": 0.5}
    assert stepped(plain(), altered(plain(), nudge), grad_tol=1e-2, **far)[0].exit_code == 0
    comparison, printed = stepped(plain(), altered(plain(), nudge), grad_tol=1e-4, **far)
    assert [line.split()[1] for line in lines(printed)] == ["GRADIENT"]
    assert "tol=1.00000e-04" in printed
    assert comparison.exit_code == 1


def test_tolerances_and_floors_can_be_mixed() -> None:
    comparison, printed = stepped(plain(), plain(lr=0.0), grad_tol=1e-3)

    assert "param_tol=measured\n" in printed
    assert "grad_tol=1.000000e-03\n" in printed
    assert {line.split()[1] for line in lines(printed)} == {"PARAMETER"}
    comparison, printed = stepped(plain(), altered(plain(), scaled(1.5)), grad_tol=1e-3)
    assert {line.split()[1] for line in lines(printed)} == {"GRADIENT"}
    assert comparison.exit_code == 1


def test_a_baseline_with_a_step_of_its_own_cannot_be_copied_and_the_verdict_says_so() -> None:
    comparison, printed = stepped(altered(plain(), scaled(1.0)), plain())

    assert "param_tol=uncalibrated\n" in printed
    assert not comparison.calibrated
    assert comparison.exit_code == 0


def test_other_data_is_said_to_be_misaligned() -> None:
    model, optimizer = plain()

    def on_other_samples(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens.flip(0))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    comparison, printed = stepped(plain(), (model, optimizer, on_other_samples))

    assert comparison.verdict == "misaligned"
    assert "MISALIGNED batch=0 The batch differs: (root) input[0]" in printed
    assert printed.endswith("TEST FAILED\n")


def test_other_initial_parameters_are_said_to_be_misaligned() -> None:
    comparison, printed = stepped(plain(), plain(seed=1))

    assert comparison.verdict == "misaligned"
    assert next(lines(printed, "MISALIGNED")).startswith("MISALIGNED batch=0 embed.weight starts with other values")


def test_activations_are_compared_where_asked_for() -> None:
    model, optimizer = plain()
    model.blocks[1].norm.eps = 1e-2
    comparison, printed = stepped(plain(), (model, optimizer), track_activations=True)

    first = next(lines(printed))
    assert first.startswith("DIVERGED ACTIVATION rank=0 batch=0 name=blocks.1.norm slot=output[0] abs_diff=")
    assert first.endswith(" phase=forward")
    assert comparison.verdict == "diverged"


def test_only_every_so_manieth_step_is_compared() -> None:
    comparison, printed = stepped(plain(), plain(), batches(7), test_every=3, status_every=2)

    assert comparison.steps == (0, 3, 6)
    assert [line.split()[1] for line in lines(printed, "STATUS")] == [f"batch={number}" for number in (0, 2, 4, 6)]


def test_batches_stops_early_and_a_generator_needs_no_length() -> None:
    comparison, printed = stepped(plain(), plain(), iter(batches(9)), num_batches=4)
    assert comparison.steps == (0, 1, 2, 3)
    assert "batches=4\n" in printed
    comparison, printed = stepped(plain(), plain(), iter(batches(3)))
    assert "batches=all\n" in printed
    assert [line.split()[1:4] for line in lines(printed, "STATUS")] == [["batch=0", "/", "?"], ["batch=2", "/", "?"]]


def test_in_a_loop_of_ones_own_step_says_whether_the_sides_agree() -> None:
    file = io.StringIO()
    with traindiff.Lockstep(plain(), altered(plain(), into_nan), loss=loss_of, file=file) as stepper:
        agree = [stepper.step(batch) for batch in batches(2)]
        assert not stepper.passed
        comparison = stepper.finish()

    assert agree == [True, False]
    assert comparison is stepper.comparison
    assert not stepper.passed
    assert file.getvalue().endswith("TEST FAILED\n")


def test_leaving_the_block_finishes() -> None:
    with traindiff.Lockstep(plain(), plain(), loss=loss_of, file=io.StringIO()) as stepper:
        for batch in batches(2):
            stepper.step(batch)

    assert stepper.passed


class OwnLoss(nn.Module):
    """Computes its loss, and gives it in one of several ways."""

    def __init__(self, give: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = Model()
        self.give = give

    def forward(self, tokens: Tensor) -> Any:
        return self.give(loss_of(self.inner, tokens))


class Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize("give", [lambda one: one, Output, lambda one: {"loss": one}, lambda one: (one, None)])
@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: (one,), lambda one: {"tokens": one}])
def test_a_model_may_compute_its_loss(give: Any, wrap: Any) -> None:
    def side() -> Any:
        model = OwnLoss(give)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    comparison, printed = stepped(side(), side(), [wrap(one) for one in batches()], loss=None)

    assert comparison.verdict == "identical"
    assert "base_loss=3.0" in printed


def test_a_training_brings_its_batches() -> None:
    def training() -> traindiff.Training:
        model, optimizer = plain()
        return traindiff.Training(model=model, optimizer=optimizer, batches=batches(2), loss=loss_of)

    file = io.StringIO()
    stepper = traindiff.Lockstep(training(), training(), file=file)

    assert stepper.go().steps == (0, 1)
    assert stepper.passed


def trained_alone(side: Any, num: int) -> list[Tensor]:
    model, optimizer = side
    torch.manual_seed(7)
    losses = []
    for tokens in batches(num):
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(one.detach().clone() for one in model.parameters()), torch.get_rng_state()]


class Dropping(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.embed(tokens))))


def dropping() -> Any:
    torch.manual_seed(0)
    model = Dropping()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def test_both_sides_train_as_they_would_alone_to_the_bit() -> None:
    alone = trained_alone(dropping(), 4)
    baseline, candidate = dropping(), dropping()
    torch.manual_seed(7)
    file = io.StringIO()
    stepper = traindiff.Lockstep(
        baseline, candidate, batches(4), loss=loss_of, track_activations=True, file=file, status_every=1
    )
    comparison = stepper.go()

    assert comparison.verdict == "identical", str(comparison)
    assert torch.equal(torch.get_rng_state(), alone[-1])
    for model, _ in (baseline, candidate):
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), alone[4:-1], strict=True))
        assert not any(model._forward_hooks or module._forward_hooks for module in model.modules())


def test_what_one_side_does_is_not_recorded_as_the_others(tmp_path: Any) -> None:
    def clip(model: nn.Module, _number: int) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        traindiff.inspect("only in the candidate", torch.ones(3))

    comparison, _ = stepped(plain(), altered(plain(), clip), output=tmp_path, track_activations=True)

    seen: dict[str, set[str]] = {}
    for name in ("baseline", "candidate"):
        (one,) = traindiff.open_recording(str(tmp_path / name)).steps(0)
        seen[name] = {f"{entry.phase} {entry.stage} {entry.path}" for entry in one.observations}
        assert len([entry for entry in one.observations if entry.phase == "loss"]) == 1
    only = {"grad clipped (all parameters)", "forward  only in the candidate"}
    assert only <= seen["candidate"]
    assert not only & seen["baseline"]
    assert comparison.first_divergence is not None
    assert "The candidate clips gradients to a norm of 0.001; the baseline does not clip." in str(comparison)


def test_copies_that_measure_noise_follow_the_baselines_schedule_and_step_nothing_else() -> None:
    model, optimizer = plain()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    other, other_optimizer = plain()
    other_schedule = torch.optim.lr_scheduler.ExponentialLR(other_optimizer, 0.5)
    with traindiff.Lockstep((model, optimizer), (other, other_optimizer), loss=loss_of, file=io.StringIO()) as stepper:
        for batch in batches(3):
            assert stepper.step(batch)
            schedule.step()
            other_schedule.step()
    alone, alone_optimizer = plain()
    alone_schedule = torch.optim.lr_scheduler.ExponentialLR(alone_optimizer, 0.5)
    for batch in batches(3):
        loss_of(alone, batch).backward()
        alone_optimizer.step()
        alone_optimizer.zero_grad()
        alone_schedule.step()

    assert stepper.comparison is not None
    assert (stepper.comparison.verdict, stepper.comparison.calibrated) == ("identical", True)
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("since", [0, 2])
def test_a_batch_that_the_baseline_changes_in_place_reaches_the_candidate_as_it_came(since: int) -> None:
    baseline = overwriting(lambda number: number >= since)
    given = batches(4)

    if since == 0:
        comparison, _ = stepped(baseline, plain(), copy.deepcopy(given))
        assert comparison.verdict == "identical", str(comparison)
    else:
        with pytest.raises(traindiff.LockstepError, match="The step of the baseline changed a tensor of batch 2 in"):
            stepped(baseline, plain(), copy.deepcopy(given))


def accumulating() -> Side:
    """The plain side, which steps in every second batch."""
    model, optimizer = plain()
    number = iter(range(9))

    def accumulates(tokens: Tensor) -> Tensor:
        loss = loss_of(model, tokens) / 2
        loss.backward()
        if next(number) % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return model, optimizer, accumulates


def test_sides_that_step_in_other_batches_are_refused_with_both_names() -> None:
    with pytest.raises(traindiff.LockstepError, match="The baseline has ended step 0 of optimizer in a batch in which"):
        stepped(plain(), accumulating())


def test_sides_that_accumulate_alike_are_compared_step_by_step() -> None:
    comparison, _ = stepped(accumulating(), accumulating(), batches(6))

    assert comparison.steps == (0, 1, 2)
    assert comparison.verdict == "identical"


def test_an_error_in_a_step_says_where_it_was_raised_and_leaves_no_hooks() -> None:
    model, optimizer = plain()

    def fails(_tokens: Tensor) -> Tensor:
        raise ValueError("no such token")

    with pytest.raises(ValueError, match="no such token") as raised:
        stepped(plain(), (model, optimizer, fails))

    assert raised.value.__notes__ == ["traindiff.Lockstep: raised in the step of the candidate, in batch 0, on rank 0."]
    assert not any(module._forward_hooks for module in model.modules())


def test_resync_finds_two_faults_that_have_nothing_to_do_with_each_other() -> None:
    def fault(model: nn.Module, number: int) -> None:
        if number == 1:
            model.embed.weight.grad.mul_(1.5)
        if number == 3:
            model.blocks[0].down.weight.grad.neg_()

    comparison, printed = stepped(plain(), altered(plain(), fault), batches(6), resync=True, status_every=1)

    found = [line.split()[1:6] for line in lines(printed)]
    assert found == [
        ["GRADIENT", "rank=0", "batch=1", "grad_idx=0", "name=embed.weight"],
        ["GRADIENT", "rank=0", "batch=3", "grad_idx=5", "name=blocks.0.down.weight"],
    ]
    assert comparison.steps == (0, 1, 2, 3, 4, 5)
    assert [one.step for one in comparison.findings] == [1, 3]
    assert all("rel_diff=0.0" in line for line in lines(printed, "STATUS"))


def test_noise_recordings_measure_the_floors_in_place_of_copies(tmp_path: Any) -> None:
    for name, replica in (("one", "ulp:1"), ("two", "ulp:2")):
        model, optimizer = plain()
        with traindiff.record(tmp_path / name, model, optimizer, replica=replica):
            for tokens in batches():
                loss_of(model, tokens).backward()
                optimizer.step()
                optimizer.zero_grad()
    noise = [tmp_path / "one", tmp_path / "two"]

    comparison, printed = stepped(altered(plain(), scaled(1.0)), altered(plain(), scaled(1.0001)), noise=noise)

    assert "param_tol=measured\n" in printed
    assert comparison.calibrated
    assert comparison.verdict == "diverged"
    with pytest.raises(traindiff.ConfigError, match="is no other run of the baseline's training"):
        stepped(plain(seed=1), plain(seed=1), noise=noise)


def test_names_of_the_candidate_can_be_mapped() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wrapped = plain()[0]

        def forward(self, tokens: Tensor) -> Tensor:
            return self.wrapped(tokens)

    model = Wrapper()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    comparison, _ = stepped(
        plain(), altered((model, optimizer), scaled(1.5)), batches(3), rename={"^wrapped[.]": ""}, resync=True
    )

    assert [one.step for one in comparison.findings] == [0, 1, 2], str(comparison)


def test_what_is_wrong_with_the_settings_is_said_at_once() -> None:
    with pytest.raises(traindiff.ConfigError) as raised:
        stepped(plain()[0], (plain()[0], None, 3), test_every=0, param_tol=-1.0, activation_tol=1.0, resync="yes")

    assert len(raised.value.problems) == 6
    with pytest.raises(traindiff.ConfigError, match="resync=True, test_every=2"):
        stepped(plain(), plain(), test_every=2, resync=True)
    same = plain()
    with pytest.raises(traindiff.ConfigError, match="are the same model"):
        stepped(same, same)
    with pytest.raises(traindiff.ConfigError, match="leaves nothing to compare"):
        stepped(plain(), plain(), track_params=False, track_loss=False, track_grads=False)
    with pytest.raises(traindiff.ConfigError, match="has no batch"):
        stepped(plain(), plain(), [])
    for data, message in ((None, "was not given"), (5, "is an int, which holds no batches")):
        with (
            traindiff.Lockstep(plain(), plain(), data, loss=loss_of, file=io.StringIO()) as stepper,  # type: ignore[arg-type]
            pytest.raises(traindiff.ConfigError, match=message),
        ):
            stepper.go()
    with pytest.raises(
        traindiff.ConfigError, match=r"what Model returns has a tensor of shape \[8, 7, 19\] for a loss"
    ):
        stepped(plain(), plain(), loss=None)
