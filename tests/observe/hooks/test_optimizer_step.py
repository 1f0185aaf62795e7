"""What an optimizer reads and writes, and which optimizers are followed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import row, rows, sites, unobserved
from tests.observe.hooks.trainings import TRAININGS, batches
from traindiff.core.kernels import summarize
from traindiff.core.shards import Shard
from traindiff.core.summary import add
from traindiff.observe.torch.hooks import nested as sparse_gradients
from traindiff.storage import open_recording

PARAMETERS = ["0.weight", "0.bias", "2.weight", "2.bias"]


def train(model: nn.Module, *optimizers: Optimizer, steps: int = 1) -> None:
    for batch in batches(steps):
        model(batch).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_are_those_that_the_optimizer_sees(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        model(next(batches())).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped = model[0].weight.grad.clone()
        optimizer.step()

    _, summary = row(tmp_path / "run", phase="grad", path="0.weight")
    assert summary["fingerprint"] == summarize(clipped, Shard.whole((16, 8)))["fingerprint"]


def test_gradients_come_before_and_state_and_parameters_after_the_step(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        train(model, optimizer)

    grads = rows(tmp_path / "run", phase="grad")
    state = [one for one in rows(tmp_path / "run", phase="optimizer") if one[0].path in PARAMETERS]
    params = rows(tmp_path / "run", phase="param", stage="")
    assert sites(grads) == [(path, "grad") for path in PARAMETERS]
    assert sites(params) == [(path, "value") for path in PARAMETERS]
    assert sites(state) == [(path, slot) for path in PARAMETERS for slot in ("step", "exp_avg", "exp_avg_sq")]
    assert max(seen.order for seen, _ in grads) < min(seen.order for seen, _ in state)
    assert row(tmp_path / "run", path="2.bias", slot="step")[1]["sum"] == 1
    expected = summarize(model[2].weight, Shard.whole((4, 16)))
    assert row(tmp_path / "run", phase="param", stage="", path="2.weight")[1] == expected


def test_settings_of_the_optimizer_that_change_the_update_are_recorded(tmp_path: Path) -> None:
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = SGD(groups, lr=0.1, momentum=0.9)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        train(model, optimizer)

    lr = [row(tmp_path / "run", path=f"optimizer.groups[{n}]", slot="lr")[1]["sum"] for n in range(2)]
    assert lr == [0.1, 0.5]
    slots = {seen.slot for seen, _ in rows(tmp_path / "run", path="optimizer.groups[0]")}
    assert slots >= {"lr", "momentum", "weight_decay", "nesterov"}
    assert not slots & {"params", "foreach", "fused", "differentiable"}  # how it is computed, not what


def test_a_parameter_without_a_gradient_is_unobserved_and_a_frozen_one_is_not_expected(tmp_path: Path) -> None:
    TRAININGS["frozen_and_unused_parameters"](
        lambda *args: traindiff.record(tmp_path / "run", *args, steps=0, strict=True)
    )

    reason = "no gradient: parameter.grad is None when the optimizer steps"
    assert unobserved(tmp_path / "run") == [("3.unused", "grad", reason)]
    assert {seen.path for seen, _ in rows(tmp_path / "run", phase="grad")} == {"2.weight", "2.bias", "3.unused"}
    assert {seen.path for seen, _ in rows(tmp_path / "run", phase="param", stage="")} >= {"0.weight", "3.unused"}


def test_a_sparse_gradient_is_recorded_as_the_dense_one_that_it_stands_for(tmp_path: Path) -> None:
    tokens = torch.tensor([[1, 1, 4]])
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(10, 8, sparse=sparse), nn.Linear(8, 4))
        optimizer = SGD(model.parameters(), lr=0.1)
        observe = ["grad", "grad.micro"]
        with traindiff.record(tmp_path / str(sparse), model, optimizer, observe=observe, strict=True):
            model(tokens).square().mean().backward()
            optimizer.step()

    assert unobserved(tmp_path / "True") == []
    for stage in ("", "micro"):
        found, expected = (row(tmp_path / str(sparse), path="0.weight", stage=stage)[1] for sparse in (True, False))
        assert found == expected


def test_a_sparse_gradient_that_would_be_too_large_is_unobserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_gradients, "MOST_BYTES", 100)
    observe = {"observe": "grad", "steps": 0, "strict": True}
    TRAININGS["sparse_gradients"](lambda *args: traindiff.record(tmp_path / "run", *args, **observe))

    assert unobserved(tmp_path / "run") == [("0.weight", "grad", "layout sparse_coo has no dense elements")]


def test_only_selected_parameters_are_observed(tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, select="2*", strict=True):
        train(model, optimizer)

    for phase in ("grad", "param"):
        assert {seen.path for seen, _ in rows(tmp_path / "run", phase=phase)} == {"2.weight", "2.bias"}
    state = {seen.path for seen, _ in rows(tmp_path / "run", phase="optimizer")}
    assert state == {"2.weight", "2.bias", "optimizer.groups[0]"}


def test_a_parameter_that_the_model_does_not_have_is_named_by_its_group(tmp_path: Path) -> None:
    model = mlp()
    extra = nn.Parameter(torch.ones(3))
    optimizer = SGD([*model.parameters(), extra], lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        (model(next(batches())).sum() + extra.sum()).backward()
        optimizer.step()

    assert ("optimizer.groups[0].params[4]", "grad") in sites(rows(tmp_path / "run", phase="grad"))


def test_tied_weights_are_one_parameter_with_two_names(tmp_path: Path) -> None:
    TRAININGS["tied_weights"](lambda *args: traindiff.record(tmp_path / "run", *args, steps=0, strict=True))

    assert sites(rows(tmp_path / "run", phase="grad")) == [("embedding.weight", "grad")]
    content = open_recording(str(tmp_path / "run")).rank_content(0)
    assert content["tied"] == {"head.weight": "embedding.weight"}
    assert list(content["parameters"]) == ["embedding.weight"]


def test_either_name_of_a_tied_weight_selects_it(tmp_path: Path) -> None:
    for name in ("embedding.weight", "head.weight"):
        TRAININGS["tied_weights"](
            lambda *args, name=name: traindiff.record(tmp_path / name, *args, select=name, steps=0, strict=True)
        )

        assert sites(rows(tmp_path / name, phase="grad")) == [("embedding.weight", "grad")]


def test_contributions_of_micro_batches_are_terms_of_the_gradient(tmp_path: Path) -> None:
    TRAININGS["gradient_accumulation"](
        lambda *args: traindiff.record(tmp_path / "run", *args, observe=["grad", "grad.micro"], strict=True)
    )

    terms = rows(tmp_path / "run", stage="micro", path="0.weight", step=1)
    assert [(seen.micro_step, seen.merge) for seen, _ in terms] == [(0, "sum"), (1, "sum"), (2, "sum")]
    whole = row(tmp_path / "run", phase="grad", stage="", path="0.weight", step=1)[1]
    total = add([summary for _, summary in terms])
    assert abs(total["sum"] - whole["sum"]) < 1e-6
    assert abs(total["sketch"] - whole["sketch"]).max() < 1e-6


def test_several_optimizers_each_count_their_own_steps(tmp_path: Path) -> None:
    model = mlp()
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, {"slow": first, "fast": second}, strict=True):
        for _ in range(2):
            train(model, first)
            train(model, second)
            train(model, second)

    steps = {
        name: [seen.step for seen, _ in rows(tmp_path / "run", phase="grad", path=path, optimizer=name)]
        for name, path in (("slow", "0.weight"), ("fast", "2.weight"))
    }
    assert steps == {"slow": [0, 1], "fast": [0, 1, 2, 3]}
    assert {seen.optimizer for seen, _ in rows(tmp_path / "run", phase="forward")} == {"slow"}


def test_optimizers_in_a_list_are_numbered(tmp_path: Path) -> None:
    TRAININGS["two_optimizers"](lambda *args: traindiff.record(tmp_path / "run", *args, strict=True))

    names = {seen.optimizer for seen, _ in rows(tmp_path / "run")}
    assert names == {"optimizer[0]", "optimizer[1]"}


def test_a_found_optimizer_is_recorded_exactly_as_a_given_one(tmp_path: Path) -> None:
    TRAININGS["plain"](lambda *args: traindiff.record(tmp_path / "given", *args, strict=True))
    TRAININGS["optimizer_not_given"](lambda *args: traindiff.record(tmp_path / "found", *args, strict=True))

    given, found = ([(seen, bytes(summary)) for seen, summary in rows(tmp_path / name)] for name in ("given", "found"))
    assert found == given
    contents = [open_recording(str(tmp_path / name)).rank_content(0) for name in ("given", "found")]
    assert contents[0]["optimizers"] == contents[1]["optimizers"]
    assert contents[0]["optimizers"] == [{"name": "optimizer", "type": "AdamW", "groups": [PARAMETERS]}]


def test_every_optimizer_that_holds_a_parameter_of_the_model_is_found(tmp_path: Path) -> None:
    model, other = mlp(), mlp()
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    unrelated = SGD(other.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, strict=True):
        train(other, unrelated)
        train(model, first, second, steps=2)

    assert {seen.optimizer for seen, _ in rows(tmp_path / "run")} == {"optimizer", "optimizer[1]"}
    assert [seen.step for seen, _ in rows(tmp_path / "run", phase="grad", path="2.bias")] == [0, 1]


def test_gradients_that_a_closure_computes_belong_to_its_own_step(tmp_path: Path) -> None:
    outcomes = {
        name: TRAININGS[name](
            lambda *args, name=name: traindiff.record(tmp_path / name, *args, observe="grad", strict=True)
        )
        for name in ("plain", "step_with_a_closure", "lbfgs_with_a_closure")
    }

    for name, outcome in outcomes.items():
        for step in range(3):
            expected = outcome[f"step {step} grad 0.weight"]
            found = rows(tmp_path / name, phase="grad", path="0.weight", step=step)
            assert [seen.evaluation for seen, _ in found] == list(range(len(found)))
            assert len(found) == 1 or name == "lbfgs_with_a_closure"
            assert found[-1][1]["fingerprint"] == summarize(expected, Shard.whole((16, 8)))["fingerprint"]
        assert unobserved(tmp_path / name) == []


def test_a_step_with_a_closure_is_recorded_as_one_without(tmp_path: Path) -> None:
    for name in ("plain", "step_with_a_closure"):
        TRAININGS[name](lambda *args, name=name: traindiff.record(tmp_path / name, *args, strict=True))

    expected, actual = (
        {
            (seen.step, seen.micro_step, seen.phase, seen.stage, seen.path, seen.slot, bytes(summary))
            for seen, summary in rows(tmp_path / name)
        }
        for name in ("plain", "step_with_a_closure")
    )
    assert actual == expected


def test_a_closure_gives_one_step_per_call_of_the_optimizer(tmp_path: Path) -> None:
    TRAININGS["lbfgs_with_a_closure"](lambda *args: traindiff.record(tmp_path / "run", *args, strict=True))

    assert sorted({seen.step for seen, _ in rows(tmp_path / "run", phase="param", stage="")}) == [0, 1, 2]


def scheduled(optimizer: Optimizer) -> None:
    StepLR(optimizer, 1)


def bound(optimizer: Optimizer) -> None:
    optimizer.step = optimizer.step  # type: ignore[method-assign]


def bound_and_scheduled(optimizer: Optimizer) -> None:
    bound(optimizer)
    scheduled(optimizer)


def wrapped(optimizer: Optimizer) -> None:
    step = optimizer.step
    optimizer.step = lambda: step()  # type: ignore[method-assign]


def wrapped_twice(optimizer: Optimizer) -> None:
    wrapped(optimizer)
    optimizer.step = partial(optimizer.step)  # type: ignore[method-assign]


@pytest.mark.parametrize("replace", [scheduled, bound, bound_and_scheduled, wrapped, wrapped_twice])
def test_parameters_may_be_written_between_the_steps_of_an_optimizer_whose_step_is_replaced(
    replace: Callable[[Optimizer], None], tmp_path: Path
) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    replace(optimizer)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True) as recording:
        for batch in batches(3):  # looks for a sharp minimum by hand
            for move in (0.01, -0.01):
                model(batch).square().mean().backward()
                with torch.no_grad():
                    torch._foreach_add_([*model.parameters()], move)
            optimizer.step()
            optimizer.zero_grad()

    assert recording.steps == {"optimizer": 3}
    assert unobserved(tmp_path / "run") == []


def test_two_optimizers_with_schedulers_may_hold_one_parameter(tmp_path: Path) -> None:
    model = mlp()
    first, second = SGD(model.parameters(), lr=0.1), SGD(model.parameters(), lr=0.1)
    scheduled(second)
    with traindiff.record(tmp_path / "run", model, [first, second], strict=True) as recording:
        train(model, first, second, steps=3)

    assert [*recording.steps.values()] == [3, 3]


class Caller:
    """Calls a step that nothing tells from outside."""

    def __init__(self, step: Callable[[], object]) -> None:
        self.inner = step

    def step(self) -> None:
        self.inner()


def test_a_wrapped_step_that_has_called_the_hooks_is_seen(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.step = Caller(optimizer.step).step  # type: ignore[method-assign]
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True) as recording:
        train(model, optimizer)
        for batch in batches(2):
            model(batch).square().mean().backward()
            with torch.no_grad():
                model[0].weight.add_(0.01)

    assert recording.steps == {"optimizer": 1}


def test_a_step_that_a_loss_scaler_leaves_out_is_recorded_as_skipped(tmp_path: Path) -> None:
    TRAININGS["gradient_scaler"](lambda *args: traindiff.record(tmp_path / "run", *args, strict=True))

    assert [seen.step for seen, _ in rows(tmp_path / "run", path="optimizer", slot="skipped")] == [1]
    for phase in ("forward", "grad", "param"):
        found = rows(tmp_path / "run", phase=phase, stage="")
        assert sorted({(seen.step, seen.micro_step) for seen, _ in found}) == [(0, 0), (1, 0), (2, 0), (3, 0)]
    _, gradient = row(tmp_path / "run", phase="grad", step=1, path="0.weight")
    assert gradient["nan"] + gradient["positive_infinity"] + gradient["negative_infinity"] > 0
    weights = [int(one["fingerprint"]) for _, one in rows(tmp_path / "run", phase="param", stage="", path="0.weight")]
    assert weights[0] == weights[1] != weights[2]


def test_an_optimizer_is_found_although_its_first_step_is_skipped(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with traindiff.record(tmp_path / "run", model, strict=True):
        for batch, factor in zip(batches(2), (float("inf"), 1.0), strict=True):
            scaler.scale(model(batch).square().mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert [seen.step for seen, _ in rows(tmp_path / "run", slot="skipped")] == [0]
    assert [seen.step for seen, _ in rows(tmp_path / "run", phase="grad", path="0.bias")] == [0, 1]


def test_the_scaler_is_left_as_it_was(tmp_path: Path) -> None:
    plain = torch.amp.GradScaler.step
    with traindiff.record(tmp_path / "run", mlp(), strict=True):
        assert torch.amp.GradScaler.step is not plain

    assert torch.amp.GradScaler.step is plain
