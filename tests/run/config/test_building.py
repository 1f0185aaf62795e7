"""What a recipe must give, and what becomes of its model and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW

import traindiff
from tests.run.config.recipes import DECAYS, Model, groups_of, mean_loss, tied, training
from traindiff.errors import ConfigError
from traindiff.run.config.precision import computing_in, loss_scaler
from traindiff.run.config.request import Request
from traindiff.run.config.setup import PLAIN, Setup, baseline_setup
from traindiff.run.config.sharded import follow, names_of, repeated_modules
from traindiff.run.config.stepping import Parts, stepped
from traindiff.run.verify.recipe import prepared


def refused(made: traindiff.Training, setup: Setup = PLAIN) -> str:
    with pytest.raises(ConfigError) as caught:
        prepared(lambda: made, seed=0, asked_by="test", setup=setup)
    return "\n".join(f"{problem.where} {problem.what}" for problem in caught.value.problems)


def request(model: nn.Module, optimizer: Any, setup: Setup = PLAIN) -> Request:
    made = training(model, optimizer=optimizer)
    return Request(model=model, optimizer=optimizer, training=made, setup=setup, where="recipe", asked_by="test")


def test_a_training_with_a_loss_is_given_a_step() -> None:
    made = prepared(training, seed=0, asked_by="test")
    before = {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}

    numbers = made.train_on(next(iter(made.batches)))

    assert numbers.isfinite()
    assert all(not torch.equal(before[name], parameter) for name, parameter in made.model.named_parameters())
    assert all(parameter.grad is None for parameter in made.model.parameters())


def test_a_step_and_a_loss_cannot_both_be_given() -> None:
    assert "loss and step are both given" in refused(training(step=print))


def test_neither_a_step_nor_a_loss_is_no_training() -> None:
    assert "step is None, not a function." in refused(training(loss=None))


def test_a_training_with_a_step_runs_as_it_is_only() -> None:
    whole = training(loss=None, step=print)

    assert prepared(lambda: whole, seed=0, asked_by="test").step is print
    assert "loss is not given, without which the training cannot be run as: plain, dtype=bfloat16." in refused(
        whole, Setup(dtype="bfloat16")
    )


@pytest.mark.parametrize("optimizer", [None, [SGD([torch.zeros(1, requires_grad=True)])]])
def test_a_loss_needs_one_optimizer(optimizer: Any) -> None:
    assert "a training with loss needs the one optimizer that its step calls" in refused(training(optimizer=optimizer))


@pytest.mark.parametrize(("engine", "what"), [("tp", "tensor_parallel"), ("pp", "pipeline")])
def test_an_engine_that_divides_the_model_must_be_told_how(engine: Any, what: str) -> None:
    without = training(tensor_parallel=None, pipeline=None)

    assert f"{what} is not given" in refused(without, Setup(engine=engine, nproc=2))


def test_an_optimizer_without_fused_kernels_is_refused_where_they_are_asked_for() -> None:
    model = Model()
    made = training(model, optimizer=torch.optim.RMSprop(model.parameters()))

    assert "RMSprop, which has no fused kernels" in refused(made, Setup(optimizer="engine"))


def test_fused_kernels_keep_class_groups_and_settings() -> None:
    made = prepared(training, seed=0, asked_by="test", setup=Setup(optimizer="engine"))

    assert type(made.optimizer) is AdamW
    assert [(group["fused"], group["weight_decay"], group["lr"]) for group in made.optimizer.param_groups] == [
        (True, decay, 1e-2) for decay in DECAYS
    ]


# The optimizer, after an engine has put others in place of the parameters.


def test_an_optimizer_follows_its_parameters_in_the_same_groups() -> None:
    model, other = Model(), Model()
    optimizer = AdamW(groups_of(model), lr=1e-2)
    names = names_of(model)

    follow(request(model, optimizer), optimizer, names, other)

    assert [[id(one) for one in group["params"]] for group in optimizer.param_groups] == [
        [id(one) for one in group["params"]] for group in groups_of(other)
    ]
    assert [group["weight_decay"] for group in optimizer.param_groups] == list(DECAYS)


def test_a_group_of_which_a_stage_has_nothing_stays_as_an_empty_one() -> None:
    model = Model()
    optimizer = AdamW([{"params": model.embed.parameters()}, {"params": model.head.parameters()}])  # type: ignore[union-attr]
    names = names_of(model)
    model.embed = None

    follow(request(model, optimizer), optimizer, names, model)

    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]


def test_tied_parameters_have_one_first_name() -> None:
    names = names_of(Model(tied=True))

    assert names.first["head.weight"] == "embed.weight"


def test_an_optimizer_with_state_before_its_first_step_is_refused() -> None:
    model = Model()
    optimizer = Adagrad(model.parameters())

    with pytest.raises(ConfigError, match="Adagrad, which has state before its first step"):
        follow(request(model, optimizer), optimizer, names_of(model), model)


def test_an_optimizer_of_what_is_not_in_the_model_is_refused() -> None:
    model = Model()
    optimizer = SGD([*model.parameters(), torch.zeros(3, requires_grad=True)], lr=0.1)

    with pytest.raises(ConfigError, match=r"steps 1 tensors that are no parameters of the model \(shapes \[3\]\)"):
        follow(request(model, optimizer), optimizer, names_of(model), model)


def test_layers_in_lists_are_wrapped_by_themselves() -> None:
    model = Model()

    assert repeated_modules(nn.Sequential(model)) == list(model.blocks)
    assert repeated_modules(nn.ModuleList([nn.GELU()])) == []


# Dtypes.


def test_a_model_that_computes_in_a_short_dtype_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    kept = list(model.parameters())
    computing_in(model, Setup(dtype="bfloat16", precision="master"))
    seen: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda module, args: seen.append(module.weight.dtype))

    output = model(torch.randn(3, 4))
    output.float().sum().backward()

    assert (output.dtype, seen) == (torch.bfloat16, [torch.bfloat16])
    assert [id(one) for one in model.parameters()] == [id(one) for one in kept]
    assert {one.dtype for one in kept} == {torch.float32}
    assert {one.grad.dtype for one in kept if one.grad is not None} == {torch.float32}
    assert all(torch.equal(one.grad, one.grad.bfloat16().float()) for one in kept if one.grad is not None)


def test_parameters_are_given_back_when_a_forward_pass_fails() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    kept = list(model.parameters())
    computing_in(model, Setup(dtype="bfloat16", precision="master"))

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        model(torch.randn(3, 5))

    assert [id(one) for one in model.parameters()] == [id(one) for one in kept]


def test_tied_parameters_are_rounded_alike_and_their_gradients_add_up() -> None:
    made = prepared(tied, seed=0, asked_by="test", setup=Setup(dtype="bfloat16", precision="master"))
    loss = mean_loss(made.model, next(iter(made.batches)))
    loss.backward()

    assert isinstance(made.model, Model)
    assert made.model.head is not None
    assert made.model.embed is not None
    assert made.model.head.weight is made.model.embed.weight
    assert made.model.head.weight.grad is not None


@pytest.mark.parametrize(
    ("setup", "scale"),
    [
        (PLAIN, None),
        (Setup(dtype="bfloat16"), None),
        (Setup(dtype="float16"), 65536.0),
        (Setup(loss_scale=0.0), 65536.0),
        (Setup(dtype="float16", loss_scale=128.0), 128.0),
    ],
)
def test_a_loss_is_scaled_as_the_dtype_needs_or_the_setup_says(setup: Setup, scale: float | None) -> None:
    scaler = loss_scaler(setup, device=torch.device("cpu"))

    assert (scaler.get_scale() if scaler.is_enabled() else None) == scale


def test_a_scale_that_was_given_stays_when_gradients_overflow() -> None:
    model, setup = nn.Linear(1, 1), Setup(loss_scale=128.0)
    before, optimizer = model.weight.detach().clone(), SGD(model.parameters(), lr=1.0)
    made = traindiff.Training(
        model=model, optimizer=optimizer, batches=(), loss=lambda model, batch: model(batch).sum() * torch.inf
    )
    asked = Request(model=model, optimizer=optimizer, training=made, setup=setup, where="recipe", asked_by="test")
    scaler = loss_scaler(setup, device=torch.device("cpu"))

    stepped(asked, Parts(model=model, optimizer=optimizer, scaler=scaler)).train_on(torch.ones(2, 1))

    assert model.weight.equal(before)
    assert scaler.get_scale() == 128.0


# The baseline.


def test_the_baseline_computes_the_same_on_one_process() -> None:
    setup = Setup(
        engine="ddp", nproc=2, dtype="bfloat16", optimizer="engine", compile=True, gradient_accumulation_steps=4,
        gradient_clipping=0.5, loss_scale=8.0,
    )  # fmt: skip

    assert baseline_setup(setup) == Setup(dtype="bfloat16", gradient_clipping=0.5, loss_scale=8.0)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2", "deepspeed"])
def test_the_baseline_of_master_weights_has_them_too_and_a_micro_batch_for_each_part(engine: Any) -> None:
    setup = Setup(engine=engine, nproc=2, dtype="bfloat16", gradient_accumulation_steps=2)

    assert baseline_setup(setup) == Setup(dtype="bfloat16", precision="master", gradient_accumulation_steps=4)
    assert baseline_setup(Setup(engine=engine, nproc=2)) == PLAIN


def test_a_loss_that_does_not_call_its_model_cannot_be_a_pipeline() -> None:
    from traindiff.run.config.pipeline_parallel import captured_call

    def loss(_: nn.Module, batch: Tensor) -> Tensor:
        return batch.float().mean()

    made = training(loss=loss)
    asked = Request(
        model=made.model, optimizer=SGD(made.model.parameters()), training=made, setup=PLAIN, where="recipe",
        asked_by="test",
    )  # fmt: skip

    with pytest.raises(ConfigError, match="does not call the model that it is given"):
        captured_call(asked, torch.zeros(2, 3))
