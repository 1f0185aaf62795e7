"""The origin of the first NaN is named, wherever it is made."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.nonfinite.trainings import WIDTH, Net, Scale, found, train


def in_step(number: int, change: Any) -> Any:
    def breaks(model: Any, optimizer: Any, step: int) -> None:
        if step == number:
            change(model, optimizer)

    return breaks


def set_scale(model: Any, _: Any) -> None:
    model.scale.factor = 3e38


def test_an_overflow_in_a_module_is_named_with_what_it_was_given() -> None:
    message = found(breaks=in_step(1, set_scale), batch=10 * torch.ones(6, WIDTH))

    assert message.startswith(
        "Detected inf/nan during batch_number=1. scale output holds infinity; what Scale was given is"
    )
    assert "finite (input[0] up to " in message
    assert "the largest float32 is 3.4e+38" in message


def test_an_overflow_in_the_code_between_modules_is_put_down_to_the_module_around_them() -> None:
    def change(model: Any, _: Any) -> None:
        model.between = float("inf")

    message = found(breaks=in_step(2, change))

    assert "batch_number=2" in message
    assert "last input[0] holds NaN, made by the code of (root) (Net) itself, between steep and last" in message


def test_a_batch_that_holds_nan_is_named_before_any_module() -> None:
    batch = torch.ones(6, WIDTH)
    batch[3, 2] = float("nan")

    assert "The batch: (root) input[0] holds NaN when the forward pass begins." in found(batch=batch)


def test_a_parameter_that_is_nan_from_the_start_is_named() -> None:
    def make() -> nn.Module:
        model = Net()
        model.last.bias.data[1] = float("nan")
        return model

    assert "The parameter last.bias holds NaN before it is first used" in found(make=make)


def test_a_weight_that_was_changed_behind_the_optimizers_back_is_named() -> None:
    def change(model: Any, _: Any) -> None:
        model.last.weight.data[0, 0] = float("inf")

    message = found(breaks=in_step(1, change))

    assert "last output holds" in message
    assert "as does weight of last, changed outside of the optimizer." in message


def test_a_weight_that_has_grown_behind_the_optimizers_back_is_told_as_it_is() -> None:
    def change(model: Any, _: Any) -> None:
        model.last.weight.data.fill_(3e38)

    message = found(breaks=in_step(1, change))

    assert "last output holds" in message
    assert "(weight up to 3e+38, " in message


def test_a_loss_that_overflows_is_told_from_the_model() -> None:
    message = found(loss_of=lambda output: (output * 1e30).square().sum())

    assert message == (
        "Detected inf/nan during batch_number=0. The loss is infinite: every output of a module is finite, so the loss "
        "function made it."
    )


def test_an_overflow_in_a_backward_pass_is_put_down_to_the_module_that_made_the_gradient() -> None:
    def change(model: Any, _: Any) -> None:
        model.steep.factor = 3e38

    message = found(breaks=in_step(1, change), loss_of=lambda output: 1e3 * output.sum())

    assert (
        "The gradient that comes back to scale output holds infinity: made by the backward pass of steep (Steep) from"
        in message
    )
    assert "every gradient before it is finite." in message


def test_a_backward_pass_of_the_code_between_modules_is_put_down_to_the_module_that_took_its_result() -> None:
    class Between(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.act(self.first(x))
            return self.last(torch.sqrt(hidden * 0) + hidden)

    message = found(make=Between)

    assert (
        "The gradient that comes back to act output holds NaN: made by the backward pass of the code of (root)"
        in message
    )


def test_a_gradient_of_a_parameter_that_is_not_finite_is_found_before_the_optimizer_uses_it() -> None:
    kept: list[Any] = []

    def change(model: Any, _: Any) -> None:
        kept[:] = [model, model.first.weight.detach().clone()]
        model.first.weight.register_hook(lambda gradient: gradient / 0)

    message = found(breaks=in_step(1, change))

    assert "The gradient of first.weight holds infinity when the optimizer steps" in message
    assert torch.equal(kept[0].first.weight, kept[1])


def test_of_several_gradients_that_of_the_module_which_was_called_last_is_the_origin() -> None:
    def change(model: Any, _: Any) -> None:
        for layer in (model.first, model.last):
            layer.weight.register_hook(lambda gradient: gradient + float("inf"))

    assert "The gradient of last.weight holds infinity when the optimizer steps (of 2 such" in found(
        breaks=in_step(0, change)
    )


def test_state_that_overflows_in_the_optimizer_is_named_with_the_square_of_its_gradient() -> None:
    def change(model: Any, _: Any) -> None:
        model.last.weight.register_hook(lambda gradient: torch.full_like(gradient, 1e25))

    message = found(breaks=in_step(1, change))

    assert (
        "last.weight exp_avg_sq holds infinity after the step: its gradient is finite (up to 1e+25, its square 1e+50)"
        in message
    )


def test_a_parameter_that_overflows_in_the_optimizer_is_named() -> None:
    def change(model: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = 1e38
        model.last.weight.register_hook(lambda gradient: torch.full_like(gradient, 1e3))

    message = found(breaks=in_step(1, change), optimizer=torch.optim.SGD)

    assert "The parameter last.weight holds infinity after the step: its gradient is finite (up to 1e+03)" in message


def test_a_learning_rate_that_is_not_finite_is_named_before_the_step() -> None:
    def change(_: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = float("nan")

    assert "The setting lr of optimizer.groups[0] is NaN." in found(breaks=in_step(1, change))


def test_micro_steps_and_evaluation_are_told_apart() -> None:
    calls = [0]

    class Third(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return x / 0 if calls[0] == 6 else x

    message = found(make=lambda: nn.Sequential(nn.Linear(WIDTH, 4), Third()), micro_batches=4)
    assert "during batch_number=1, micro-step 2. 1 output" in message

    model = nn.Sequential(nn.Linear(WIDTH, 4), Third())
    calls[0] = 5
    with traindiff.watch(model, output=None), torch.no_grad(), pytest.raises(traindiff.NonFiniteError) as caught:
        model(torch.ones(2, WIDTH))
    assert "during an evaluation before batch_number=0. 1 output" in str(caught.value)


def test_an_optimizer_that_was_not_given_is_found() -> None:
    def change(model: Any, _: Any) -> None:
        model.last.weight.register_hook(lambda gradient: gradient + float("inf"))

    assert "batch_number=2. The gradient of last.weight" in found(breaks=in_step(2, change), given=False)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_healthy_training_prints_nothing(micro_batches: int) -> None:
    watch, printed = train(micro_batches=micro_batches, steps=5)

    assert printed == ""
    assert watch.origins == []


def test_a_warning_comes_once_and_again_after_the_training_has_recovered() -> None:
    broken = (1, 2, 4)

    def breaks(model: Any, _: Any, step: int) -> None:
        model.scale.factor = float("inf") if step in broken else 1.0

    class Frozen(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Keeps what is not finite out of the parameters."""

    with pytest.warns(traindiff.TraindiffWarning, match="scale output holds") as warned:
        watch, _ = train(breaks=breaks, optimizer=Frozen, steps=6, on_detect="warn")

    assert [origin.step for origin in watch.origins] == [1, 4]
    assert len(warned) == 2


def test_a_function_is_called_with_the_origin() -> None:
    origins: list[traindiff.Origin] = []

    train(breaks=in_step(1, set_scale), on_detect=origins.append, batch=10 * torch.ones(6, WIDTH))

    assert [(one.step, one.micro_step, one.phase, one.path, one.slot) for one in origins] == [
        (1, 0, "forward", "scale", "output")
    ]


class _Recursive(nn.Module):
    """Calls itself, and breaks between two of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, depth: int = 3) -> Tensor:
        if depth == 0:
            return self.layer(x)
        result = self(x, depth - 1)
        return result / 0 if depth == 2 else result


def test_a_model_that_calls_itself_is_followed_to_the_call_that_breaks() -> None:
    assert "(root) output holds infinity; what _Recursive was given is finite" in found(make=_Recursive)


def test_a_loss_whose_gradient_overflows_is_not_put_down_to_the_model() -> None:
    message = found(loss_of=lambda output: torch.sqrt((output * 0).square().sum()))
    assert "last output holds NaN: made by the backward pass of the loss; every gradient before it is finite" in message


class _Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x * 0)


def test_an_evaluation_in_which_everything_becomes_minus_infinity_is_no_mask() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU(), _Logarithm()), torch.randn(3, WIDTH)
    raises = pytest.raises(traindiff.NonFiniteError, match=r"an evaluation before .* 2 output holds infinity")
    with traindiff.watch(model, output=None, file=io.StringIO()), torch.no_grad(), raises:
        model(x)


def test_a_buffer_that_is_not_finite_is_named_where_its_module_computes_with_it() -> None:
    def breaks(model: Any, _: Any) -> None:
        model[1].running_mean[2] = float("nan")

    message = found(
        make=lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)).eval(), breaks=in_step(1, breaks)
    )
    assert "batch_number=1. 1 output holds NaN, as does running_mean of 1." in message


class _Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 4)
        self.register_buffer("scales", torch.tensor([1.0, float("inf")]).repeat(WIDTH // 2))
        self.register_buffer("mask", torch.full((4,), -float("inf")))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scales)


def test_a_buffer_that_is_not_finite_is_named_where_the_code_between_modules_computes_with_it() -> None:
    assert "every output before it, is finite, but scales of (root) is not." in found(make=_Weighted)


def test_running_statistics_that_overflow_are_found_although_training_goes_on_without_them() -> None:
    batch = torch.randn(6, WIDTH) * torch.tensor([[1e25]] * 6)
    message = found(make=lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4)), batch=batch)
    assert "The buffer 0.running_var holds infinity after the step, and did not before" in message


def test_running_statistics_that_are_nan_from_the_start_are_named_in_training_too() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))
        model[1].running_mean[2] = float("nan")
        return model

    assert "The buffer 1.running_mean holds NaN before it is first used." in found(make=make)


def test_masked_scores_that_a_model_returns_are_declared_by_the_name_of_the_root() -> None:
    class Scores(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.tensor([True, False, False, False]), -float("inf"))

    def loss_of(output: Tensor) -> Tensor:
        return output[:, 1:].square().mean()

    assert 'say so: masks="(root) output".' in found(make=lambda: Scores(WIDTH, 4), loss_of=loss_of)
    assert train(make=lambda: Scores(WIDTH, 4), loss_of=loss_of, masks="(root) output")[1] == ""


def test_masked_scores_that_a_module_returns_say_how_they_are_declared() -> None:
    class Scores(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).masked_fill(torch.tensor([True, False, False, False]), -float("inf"))

    message = found(make=lambda: nn.Sequential(Scores(WIDTH, 4), nn.Softmax(-1)))
    assert 'If its -inf masks something on purpose, say so: masks="0 output".' in message
    declared = train(make=lambda: nn.Sequential(Scores(WIDTH, 4), nn.Softmax(-1)), masks="0 output")
    assert declared[1] == ""


def test_names_of_modules_are_printed_on_one_line() -> None:
    model = nn.Module()
    model.forward = lambda x: model._modules["a\x1b[31m\nb"](x)  # type: ignore[method-assign]
    model.add_module("a\x1b[31m\nb", Scale())
    model._modules["a\x1b[31m\nb"].factor = float("nan")
    file = io.StringIO()
    named = pytest.raises(traindiff.NonFiniteError, match=r"a\\x1b\[31m\\nb output holds NaN")
    with traindiff.watch(model, output=None, file=file), named:
        model(torch.ones(3))
    assert "\x1b" not in file.getvalue()
    assert r"a\x1b[31m\nb Scale" in file.getvalue()


def test_names_of_classes_parameters_and_outputs_are_printed_on_one_line() -> None:
    model = type(
        "Sc\u202eale\n", (Scale,), {"forward": lambda self, x: {"o\x1b": x * self.factor * self._parameters["w\x07"]}}
    )()
    model.register_parameter("w\x07", nn.Parameter(torch.ones(3)))
    model.factor = float("nan")
    file = io.StringIO()
    with traindiff.watch(model, output=None, file=file), pytest.raises(traindiff.NonFiniteError):
        model(torch.ones(3))
    assert all(line.isprintable() for line in file.getvalue().split("\n"))
    assert r"(root) Sc\u202eale\n" in file.getvalue()
    assert r"1.00e+00 1.00e+00 w\x07" in file.getvalue()
