"""The first number that is not finite is named as the origin; infinities that are right are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import traindiff
from tests.analyse.rules.small_trainings import classifier, found, kinds, points, train
from traindiff.analyse.check import Verdict


class Faulty(nn.Module):
    """Returns its input; from step 3 on something else."""

    def __init__(self, fault: object) -> None:
        super().__init__()
        self.fault = fault
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fault(x) if self.step >= 3 else x  # type: ignore[operator,no-any-return]


def with_fault(fault: object, path: Path, **settings: object) -> Verdict:
    model = classifier()
    model.insert(2, Faulty(fault))
    optimizer = AdamW(model.parameters(), lr=1e-3)

    def set_step(step: int) -> None:
        model[2].step = step

    return traindiff.check(train(path, model, optimizer, steps=6, before_step=set_step, **settings))  # type: ignore[arg-type]


def test_the_module_that_returns_the_first_nan_is_the_origin(tmp_path: Path) -> None:
    verdict = with_fault(lambda x: torch.where(x > 0.5, x / (x - x), x), tmp_path / "run")

    (finding,) = verdict.findings
    assert verdict.verdict == "unhealthy"
    assert (finding.kind, finding.step, finding.phase, finding.path, finding.slot, finding.micro_step) == (
        "non-finite", 3, "forward", "2", "output[0]", 0,
    )  # fmt: skip
    assert finding.evidence["nan"] + finding.evidence["infinite"] > 0
    assert finding.evidence["elements"] == 32 * 32
    assert "all that was observed before it is finite, up to forward 1 output[0]" in finding.message


def test_a_gradient_that_is_not_finite_behind_a_finite_forward_pass_is_the_origin(tmp_path: Path) -> None:
    verdict = with_fault(lambda x: torch.where(x > 0, x.sqrt(), 0.0 * x), tmp_path / "run")  # sqrt has none at 0

    finding = found(verdict, "non-finite")
    assert (finding.step, finding.phase, finding.path) == (3, "backward", "1")
    assert "The forward pass is finite" in finding.message


def test_an_overflow_of_float16_is_called_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight.mul_(20000.0)
        model[2].weight.mul_(20.0)
    optimizer = SGD(model.parameters(), lr=1e-6)
    verdict = traindiff.check(train(tmp_path / "run", model, optimizer, steps=2, autocast=torch.float16))

    finding = found(verdict, "non-finite")
    assert (finding.step, finding.phase) == (0, "forward")
    assert "float16 ends at 65504: use bfloat16 or float32 here" in finding.message


def test_minus_infinity_of_which_comes_nan_is_the_origin_where_there_was_none_before(tmp_path: Path) -> None:
    def hide_all(x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(len(x))[:, None] == 3, -torch.inf)

    model = classifier()
    model.insert(2, Faulty(hide_all))
    model.insert(3, nn.Softmax(-1))  # of nothing but -inf it is NaN

    def set_step(step: int) -> None:
        model[2].step = step

    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=5, before_step=set_step)

    finding = found(traindiff.check(run), "non-finite")
    assert (finding.step, finding.phase, finding.path) == (3, "forward", "2")
    assert finding.evidence["infinite"] == 32


def test_a_batch_that_is_not_finite_is_the_origin(tmp_path: Path) -> None:
    model = classifier()

    def batches(step: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(step)
        if step == 2:
            inputs[5, 3] = torch.nan
        return inputs, labels

    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=4, batches=batches)

    (finding,) = traindiff.check(run).findings
    assert (finding.step, finding.phase, finding.slot, finding.evidence["nan"]) == (2, "batch", "input[0]", 1)
    assert finding.message.endswith("Look at how this batch was made.")


def test_a_micro_step_is_named(tmp_path: Path) -> None:
    model = classifier()

    def batches(number: int) -> tuple[Tensor, Tensor]:
        inputs, labels = points(number)
        return (inputs * torch.nan if number == 5 else inputs), labels

    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=4, micro_batches=2, batches=batches)

    finding = found(traindiff.check(run), "non-finite")
    assert (finding.step, finding.micro_step, finding.phase) == (2, 1, "batch")


def test_an_optimizer_that_makes_finite_gradients_infinite_is_the_origin(tmp_path: Path) -> None:
    model = classifier()
    optimizer = SGD(model.parameters(), lr=1e-6)

    def raise_rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e38 if step == 3 else 1e-6

    def large(outputs: Tensor, labels: Tensor) -> Tensor:
        return 1e3 * nn.functional.cross_entropy(outputs, labels)

    run = train(tmp_path / "run", model, optimizer, steps=4, before_step=raise_rate, loss_of=large)

    finding = found(traindiff.check(run), "non-finite")
    assert (finding.step, finding.phase) == (3, "param")
    assert "The gradients are finite" in finding.message


def test_a_training_that_begins_with_nan_is_told_so(tmp_path: Path) -> None:
    model = classifier()
    with torch.no_grad():
        model[0].bias[0] = torch.nan
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=2)

    finding = found(traindiff.check(run), "non-finite")
    assert (finding.step, finding.phase, finding.stage, finding.path) == (0, "param", "before", "0.bias")
    assert "The training begins with it" in finding.message


def test_a_step_that_the_training_gives_up_is_judged_too(tmp_path: Path) -> None:
    model = classifier()
    optimizer = SGD(model.parameters(), lr=0.1)

    def give_up(run: Path) -> None:
        with traindiff.record(run, model, optimizer):
            for step in range(4):
                inputs, labels = points(step)
                loss = nn.functional.cross_entropy(model(inputs * (torch.inf if step == 3 else 1.0)), labels)
                if not loss.isfinite():
                    raise ValueError("loss")
                loss.backward()
                optimizer.step()

    with pytest.raises(ValueError, match="loss"):
        give_up(tmp_path / "run")

    verdict = traindiff.check(tmp_path / "run")
    finding = found(verdict, "non-finite")
    assert (finding.step, finding.phase) == (3, "batch")
    assert verdict.steps == (0, 1, 2)


class Masked(nn.Module):
    """One head of attention with a mask that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 8)
        self.add = Adds()
        self.head = nn.Linear(8, 4)
        self.register_buffer("later", torch.full((6, 6), -torch.inf).triu(1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.add(self.score(x) @ x.transpose(1, 2), mask + self.later)
        pooled: Tensor = (scores.softmax(-1) @ x).mean(1)
        return self.head(pooled)  # type: ignore[no-any-return]


class Adds(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + mask


def test_masks_of_minus_infinity_are_right(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Masked()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            mask = torch.zeros(4, 6, 6)
            mask[:, :, 5] = -torch.inf
            mask[:, 5, 5] = 0.0
            model(torch.randn(4, 6, 8), mask).square().mean().backward()
            optimizer.step()

    verdict = traindiff.check(tmp_path / "run")

    assert (verdict.findings, verdict.warnings) == ((), ())


class Missing(nn.Linear):
    """Puts 0 in place of missing values; in one step, it makes NaN."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x.nan_to_num(0.0))
        return result * torch.nan if self.fails else result


def recorded_with_missing_values(path: Path, *, fails_at: int | None, given_from: int = 0) -> None:
    """Four steps, of batches in which a value is missing from one step on; in one step, the model fails by itself."""
    torch.manual_seed(0)
    model = nn.Sequential(Missing(3, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(4):
            model[0].fails = step == fails_at  # type: ignore[assignment]
            x = torch.randn(8, 3)
            if step >= given_from:
                x[0, 1] = torch.nan
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_what_is_not_finite_elsewhere_is_found_although_a_site_is_ignored(fails_at: int | None, tmp_path: Path) -> None:
    recorded_with_missing_values(tmp_path / "run", fails_at=fails_at)

    ignored = ["(root) input[0]", "0 input[0]"]
    verdict = traindiff.check(tmp_path / "run", rules="non-finite", ignore=ignored)
    found_there = (
        'Ignored, so not judged ("(root) input[0]"): 1 site; found there: non-finite at batch of (root) input[0].'
    )
    assert found_there in verdict.notes
    if fails_at is None:
        assert verdict.verdict == "healthy"
    else:
        (finding,) = verdict.findings
        assert (finding.step, finding.path, finding.slot) == (fails_at, "0", "output[0]")
        before = {0: "all that was observed before it is finite or ignored", 2: "nothing finite was observed before it"}
        assert before[finding.step] in finding.message


@pytest.mark.parametrize("fails_at", [None, 2])
@pytest.mark.parametrize("given_from", [0, 1])
def test_missing_values_that_the_model_replaces_are_a_note(
    given_from: int, fails_at: int | None, tmp_path: Path
) -> None:
    recorded_with_missing_values(tmp_path / "run", fails_at=fails_at, given_from=given_from)

    verdict = traindiff.check(tmp_path / "run", rules="non-finite")

    steps = {None: {0: 4, 1: 3}, 2: {0: 2, 1: 1}}[fails_at][given_from]
    times = f"step {given_from}" if steps == 1 else f"{steps} steps, first in step {given_from}"
    assert verdict.notes == (
        f"(root) input[0] has NaN in {times}, and the outputs, losses and gradients that were observed are finite: the "
        "model seems to replace it. If it is not meant, look at how the batch was made.",
    )
    places = [(one.step, one.path, one.slot) for one in verdict.findings]
    assert places == ([] if fails_at is None else [(2, "0", "output[0]")])
    assert all("nothing finite was observed before it in the step" in one.message for one in verdict.findings)


class Bank(nn.Module):
    """Keeps its latest inputs; places that none has filled yet are NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("latest", torch.full((16, 4), torch.nan))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.latest.copy_(torch.cat([x[:2], self.latest[:-2]]))
        return x - self.latest.nanmean(0)


@pytest.mark.parametrize("fails_at", [None, 2])
def test_places_that_a_buffer_has_not_filled_yet_are_a_note(fails_at: int | None, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Missing(3, 4), Bank())
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(4):
            model[0].fails = step == fails_at  # type: ignore[assignment]
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()

    verdict = traindiff.check(tmp_path / "run", rules="non-finite")

    steps = 4 if fails_at is None else 2
    assert verdict.notes == (
        f"1.latest buffer has NaN in {steps} steps, first in step 0, and the outputs, losses and gradients that were "
        "observed are finite: the model seems to replace it. If it is not meant, look at the initialization.",
    )
    assert [(one.step, one.path) for one in verdict.findings] == ([] if fails_at is None else [(2, "0")])
    assert all("before it is finite or missing in a buffer, up to" in one.message for one in verdict.findings)


class Refilled(Bank):
    """In one step, what it is filled with is NaN, which its output does not show."""

    is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x * (torch.nan if self.is_broken else 1.0))
        return x


def test_a_buffer_that_was_filled_is_judged_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), Refilled())
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(11):
            model[1].is_broken = step == 9  # type: ignore[assignment]
            optimizer.zero_grad()
            model(torch.randn(8, 3)).square().mean().backward()
            optimizer.step()

    finding = found(traindiff.check(tmp_path / "run"), "non-finite")
    assert (finding.step, finding.path, finding.slot) == (9, "1.latest", "buffer")


def test_statistics_that_begin_with_nan_are_found(tmp_path: Path) -> None:
    """Normalization by the batch hides them until the model is evaluated."""
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model[1].running_var[3] = torch.nan  # type: ignore[index]
    run = train(tmp_path / "run", model, SGD(model.parameters(), lr=0.1), steps=3)

    finding = found(traindiff.check(run), "non-finite")
    assert (finding.step, finding.path, finding.stage) == (0, "1.running_var", "before")


@pytest.mark.parametrize(("values", "rows"), [(torch.nan, 8), (torch.inf, 1)])
def test_a_batch_without_numbers_or_with_infinities_misses_no_values(values: float, rows: int, tmp_path: Path) -> None:
    model = nn.Sequential(Missing(3, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(3):
            x = torch.randn(8, 3)
            if step == 1:
                x[:rows] = values
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    finding = found(traindiff.check(tmp_path / "run", rules="non-finite"), "non-finite")
    assert (finding.step, finding.phase) == (1, "batch")


@pytest.mark.parametrize("observe", [("batch", "loss", "grad", "param"), ("batch", "forward", "grad", "param")])
def test_missing_values_that_the_model_does_not_replace_are_found(observe: Any, tmp_path: Path) -> None:
    """The training replaces NaN in gradients. Without outputs, nothing shows whether the model replaces any."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=observe, strict=True):
        for step in range(4):
            x = torch.randn(8, 3)
            if step == 2:
                x[0, 0] = torch.nan
            optimizer.zero_grad()
            model(x).square().nanmean().backward()
            for one in model.parameters():
                one.grad = one.grad.nan_to_num()  # type: ignore[union-attr]
            optimizer.step()

    finding = found(traindiff.check(tmp_path / "run", rules="non-finite"), "non-finite")
    assert (finding.step, finding.phase) == (2, "batch")


def test_a_batch_whose_loss_the_training_passes_over_is_found(tmp_path: Path) -> None:
    """The model does not replace what is not finite, and the loss that is seen is that of the next batch."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(4):
            loss = model(torch.randn(8, 3) * (torch.inf if step == 2 else 1.0)).square().mean()
            if loss.isfinite():
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    finding = found(traindiff.check(tmp_path / "run"), "non-finite")
    assert (finding.step, finding.phase, finding.slot) == (2, "batch", "input[0]")


def test_a_buffer_that_a_forward_pass_breaks_is_not_put_down_to_the_optimizer(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    def break_it(step: int) -> None:
        if step == 2:
            model[1].running_var[3] = torch.nan

    optimizer = SGD(model.parameters(), lr=0.1)
    run = train(tmp_path / "run", model, optimizer, steps=4, after_step=break_it)

    finding = found(traindiff.check(run), "non-finite")
    assert (finding.path, finding.slot) == ("1.running_var", "buffer")
    assert finding.message.endswith("look at divisions and logarithms in what updates it.")


def test_a_scaler_may_find_infinite_gradients(tmp_path: Path) -> None:
    model = classifier()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    run = train(tmp_path / "run", model, optimizer, steps=12, autocast=torch.float16, scaler=scaler)

    rows = [
        (seen, summary)
        for step in traindiff.open_recording(run).steps(0)
        for seen, summary in zip(step.observations, step.summaries, strict=True)
    ]
    assert any(seen.phase == "grad" and int(one["positive_infinity"]) + int(one["nan"]) for seen, one in rows)
    assert kinds(traindiff.check(run)) == set()


def recorded_gan(path: Path, *, first: str, fault: str, at: tuple[int, int] = (2, 1), ends: bool = True) -> Verdict:
    """Four rounds of two steps of a discriminator and one of a generator; in one of these steps, something is NaN."""
    torch.manual_seed(0)
    parts = {"generator": nn.Linear(3, 4), "discriminator": nn.Linear(4, 1)}
    optimizers = {name: AdamW(part.parameters(), lr=1e-2) for name, part in parts.items()}
    optimizers = {first: optimizers.pop(first), **optimizers}
    with traindiff.record(path, nn.ModuleDict(parts), [*optimizers.values()]):
        for number in range(4 if ends else at[0] + 1):
            for critic in range(2):
                real, noise = torch.randn(6, 4), torch.randn(6, 3)
                if (number, critic) == at and fault == "batch":
                    noise[0, 0] = torch.nan
                made = parts["generator"](noise).detach()
                (parts["discriminator"](made) - parts["discriminator"](real)).square().mean().backward()
                if (number, critic) == at and fault == "gradient":
                    parts["discriminator"].weight.grad.fill_(torch.nan)  # type: ignore[union-attr]
                optimizers["discriminator"].step()
                optimizers["discriminator"].zero_grad()
                if not ends and (number, critic) == at:
                    return traindiff.check(path)  # while the round goes on
            parts["discriminator"](parts["generator"](torch.randn(6, 3))).square().mean().backward()
            optimizers["generator"].step()
            for one in optimizers.values():
                one.zero_grad()
    return traindiff.check(path)


@pytest.mark.parametrize(("first", "step"), [("generator", 2), ("discriminator", 5)])
def test_of_two_optimizers_the_batch_is_the_origin_and_not_the_gradient_of_the_one_that_is_read_first(
    first: str, step: int, tmp_path: Path
) -> None:
    (finding,) = recorded_gan(tmp_path / "run", first=first, fault="batch").findings
    assert (finding.kind, finding.step, finding.phase, finding.path) == ("non-finite", step, "batch", "generator")


@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_of_two_optimizers_a_gradient_is_the_origin_if_the_passes_before_it_are_finite(
    first: str, tmp_path: Path
) -> None:
    (finding,) = recorded_gan(tmp_path / "run", first=first, fault="gradient").findings
    where = finding.kind, finding.step, finding.phase, finding.path
    assert where == ("non-finite", 5, "grad", "discriminator.weight")
    assert "all that was observed before it is finite, up to backward discriminator output[0]" in finding.message
    assert "The forward pass is finite" in finding.message


def test_what_is_not_finite_is_found_before_the_passes_of_its_round_are_recorded(tmp_path: Path) -> None:
    (finding,) = recorded_gan(tmp_path / "run", first="generator", fault="batch", ends=False).findings
    where = finding.kind, finding.step, finding.phase, finding.path
    assert where == ("non-finite", 5, "grad", "discriminator.weight")
    assert "Its forward pass was not recorded with it" in finding.message
