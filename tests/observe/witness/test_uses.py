"""What else a training does with its parameters and gradients: witnessed, or not, and never called wrong."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import traindiff
from tests.observe.witness.residuals import OBSERVED, RIGHT, contributed, gradients, ratios, reasons, record


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Linear(8, 2))


def _batches(count: int) -> list[Tensor]:
    return [torch.randn(16, 6, generator=torch.Generator().manual_seed(number)) for number in range(count)]


def _loss(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).square().mean()
    return found


def _healthy(path: Path) -> None:
    verdict = traindiff.check(str(path), rules="wrong-gradient")
    assert verdict.verdict == "healthy", str(verdict)


def test_a_penalty_on_weights_is_a_use_beside_the_module(tmp_path: Path) -> None:
    def loss(model: Any, batch: Tensor) -> Tensor:
        return _loss(model, batch) + 0.1 * model[0].weight.square().sum()

    path = record(tmp_path / "run", _model(), _batches(3), loss)

    assert reasons(path) == {}
    assert contributed(path) == {"0.weight"}
    assert max(ratios(path).values()) < RIGHT
    assert len(ratios(path)) == 7
    _healthy(path)


def test_tied_weights_add_up_their_uses(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(20, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens: Tensor) -> Tensor:
            found: Tensor = self.head(self.tokens(tokens).tanh())
            return found

    torch.manual_seed(0)
    tokens = torch.randint(20, (4, 9))
    path = record(tmp_path / "run", Tied(), [tokens] * 2, _loss)

    assert list(ratios(path)) == ["tokens.weight"]
    assert max(ratios(path).values()) < RIGHT


def test_a_module_that_is_called_twice_adds_up_its_calls(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(self.layer(x).relu_())
            return found

    torch.manual_seed(0)
    path = record(tmp_path / "run", Twice(), _batches(3), _loss)

    assert max(ratios(path).values()) < RIGHT
    assert len(ratios(path)) == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda layer, x: F.linear(x, layer.weight, layer.bias),
        lambda layer, x: x @ layer.weight.t() + layer.bias,
        lambda layer, x: layer(x) + F.linear(x, layer.weight) + layer.bias,
    ],
    ids=["functional", "matmul", "both"],
)
def test_functional_uses_are_witnessed(tmp_path: Path, call: Callable[..., Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.layer = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return call(self.layer, self.first(x))

    torch.manual_seed(0)
    path = record(tmp_path / "run", Model(), _batches(2), _loss)

    assert reasons(path) == {}
    assert contributed(path) == set()
    assert ratios(path).keys() == {"first.weight", "first.bias", "layer.weight", "layer.bias"}
    assert max(ratios(path).values()) < RIGHT
    _healthy(path)


def test_subclasses_that_compute_otherwise_are_witnessed(tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight * 0.5, self.bias)

    class Named(nn.Linear):
        pass

    torch.manual_seed(0)
    path = record(tmp_path / "run", nn.Sequential(Scaled(6, 6), Named(6, 2)), _batches(2), _loss)

    assert ratios(path).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert max(ratios(path).values()) < RIGHT
    assert reasons(path) == {}
    _healthy(path)


def test_of_parametrizations_contributions_are_known(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 2))
    path = record(tmp_path / "run", model, _batches(2), _loss)

    assert len(ratios(path)) == 5
    assert max(ratios(path).values()) < RIGHT
    assert contributed(path) == {f"0.parametrizations.weight.original{number}" for number in (0, 1)}
    _healthy(path)


def _doubled(parameter: Any) -> None:
    parameter.grad.mul_(2.0)


def test_a_hook_on_a_parameter_may_change_its_gradient(tmp_path: Path) -> None:
    model: Any = _model()
    model[0].weight.register_hook(lambda gradient: gradient * 0.5)
    model[3].weight.register_post_accumulate_grad_hook(_doubled)
    path = record(tmp_path / "run", model, _batches(2), _loss)

    assert reasons(path).keys() == {"3.weight"}
    assert "hook" in reasons(path)["3.weight"]
    assert contributed(path) == {"0.weight"}
    assert max(ratios(path).values()) < RIGHT
    _healthy(path)


def _node_of(parameter: Any) -> Any:
    """The node that adds to the gradient of a parameter, as engines get hold of it."""
    return parameter.expand_as(parameter).grad_fn.next_functions[0][0]


def _halved(gradients: tuple[Any, ...], *_: Any) -> tuple[Any, ...]:
    return tuple(None if one is None else 0.5 * one for one in gradients)


@pytest.mark.parametrize("before", [True, False])
def test_a_hook_on_the_node_of_a_parameter_may_change_its_gradient(tmp_path: Path, *, before: bool) -> None:
    model: Any = _model()
    node = _node_of(model[3].weight)  # kept: torch drops it with its hooks
    if before:
        node.register_prehook(_halved)
    else:
        node.register_hook(lambda *_: _doubled(model[3].weight))
    path = record(tmp_path / "run", model, _batches(4), _loss, per_step=2)

    assert reasons(path).keys() == (set() if before else {"3.weight"})
    assert contributed(path) == ({"3.weight"} if before else set())
    assert max(ratios(path).values()) < RIGHT
    _healthy(path)


def _behind_output(output: Any) -> None:
    output.grad_fn.register_hook(_halved)


def _before_output(output: Any) -> None:
    output.grad_fn.register_prehook(_halved)


def _weight_of(output: Any) -> Any:
    """The node of the transposed weight of a linear layer without a bias."""
    return output.grad_fn.next_functions[1][0]


HOOKS_IN_GRAPH: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "before the output": (_before_output, set()),
    "behind the output": (_behind_output, {"3.weight"}),
    "before the weight": (lambda output: _weight_of(output).register_prehook(_halved), {"3.weight"}),
    "behind the weight": (lambda output: _weight_of(output).register_hook(_halved), {"3.weight"}),
}


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("where", HOOKS_IN_GRAPH)
def test_hooks_on_nodes_of_a_layer_may_change_gradients(tmp_path: Path, where: str, *, functional: bool) -> None:
    hook, unknown = HOOKS_IN_GRAPH[where]

    def loss_of(model: Any, batch: Tensor) -> Tensor:
        given = model[2](model[1](model[0](batch)))
        output = F.linear(given, model[3].weight) if functional else model[3](given)
        hook(output)
        loss: Tensor = model[4](output).square().mean()
        return loss

    path = record(tmp_path / "run", _model(), _batches(4), loss_of, per_step=2)

    assert reasons(path) == {}
    assert contributed(path) == unknown
    assert max(ratios(path).values()) < RIGHT
    _healthy(path)


def test_a_gradient_that_is_lost_behind_a_hook_on_a_node_is_found(tmp_path: Path) -> None:
    model: Any = _model()
    node = _node_of(model[3].weight)
    node.register_prehook(_halved)
    path = record(tmp_path / "run", model, _batches(3), _loss, change=lambda *_: model[3].weight.grad.data.zero_())

    verdict = traindiff.check(str(path), rules="wrong-gradient")
    assert [one.path for one in verdict.findings] == ["3.weight"]
    assert node.name()


def test_a_batch_in_memory_that_is_filled_again_is_read_again(tmp_path: Path) -> None:
    model = nn.Linear(6, 2, bias=False)
    memory = np.zeros((16, 6), dtype=np.float32)
    batch = torch.from_numpy(memory)

    def loss_of(model: nn.Module, fresh: Tensor) -> Tensor:
        memory[:] = 3.0 * fresh.numpy()
        model(batch)  # looked at, and dropped
        memory[:] = fresh.numpy()
        return _loss(model, batch)

    path = record(tmp_path / "run", model, _batches(3), loss_of)

    assert max(ratios(path).values()) < RIGHT


def test_a_tensor_that_gets_the_id_of_a_replaced_parameter_is_not_taken_for_it(tmp_path: Path) -> None:
    model: Any = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = id(model[0].weight)
    others: list[Tensor] = []
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for number, given in enumerate(_batches(6)):
            if number == 2:
                fresh = nn.Parameter(model[0].weight.detach().clone())
                optimizer.param_groups[0]["params"][0] = model[0].weight = fresh
                optimizer.zero_grad()
            gc.collect()
            others += [torch.zeros(16, 6) for _ in range(20 if number >= 2 else 0)]
            batch = next((one.detach_().copy_(given) for one in others if id(one) == before), given).requires_grad_()
            (_loss(model, batch) + batch.square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert reasons(tmp_path / "run") == {}


def test_contributions_of_micro_steps_are_no_hooks(tmp_path: Path) -> None:
    path = record(tmp_path / "run", _model(), _batches(4), _loss, per_step=2, observe=(*OBSERVED, "grad.micro"))

    assert reasons(path) == {}
    assert max(ratios(path).values()) < RIGHT


def test_gradients_that_are_cleared_between_backward_passes_count_from_there(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for number, batch in enumerate(_batches(8)):
            _loss(model, batch).backward()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            (3.0 * _loss(model, batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert reasons(tmp_path / "run") == {}
    assert max(ratios(tmp_path / "run").values()) < RIGHT
    _healthy(tmp_path / "run")


def test_gradients_of_inputs_are_no_contributions(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for batch in _batches(3):
            given = batch.requires_grad_()
            torch.autograd.grad(model(given).sum(), given)
            _loss(model, given).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert max(ratios(tmp_path / "run").values()) < RIGHT
    _healthy(tmp_path / "run")


def test_a_penalty_on_gradients_is_witnessed(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        given = batch.detach().requires_grad_()
        output = model(given)
        (slope,) = torch.autograd.grad(output.sum(), given, create_graph=True)
        return output.square().mean() + slope.square().mean()

    path = record(tmp_path / "run", _model(), _batches(3), loss)

    assert contributed(path) == {"1.weight", "1.bias"}
    assert max(ratios(path).values()) < RIGHT
    assert len(ratios(path)) == 7
    _healthy(path)


def test_a_backward_pass_for_some_leaves_contributes_to_these(tmp_path: Path) -> None:
    model: Any = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for batch in _batches(3):
            _loss(model, batch).backward(inputs=(one for one in model[3:].parameters()))
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    assert reasons(tmp_path / "run") == {}
    assert max(ratios(tmp_path / "run").values()) < RIGHT


def test_two_optimizers_read_their_own_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"made": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
    optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.01) for name, part in model.items()}
    with traindiff.record(tmp_path / "run", model, optimizers, observe=OBSERVED, strict=True):
        for batch in _batches(4):
            optimizers["judge"].zero_grad()
            model["judge"](model["made"](batch).detach()).square().mean().backward()
            optimizers["judge"].step()
            optimizers["made"].zero_grad()
            (1.0 - model["judge"](model["made"](batch))).square().mean().backward()  # also into the judge
            optimizers["made"].step()

    assert len(ratios(tmp_path / "run")) == 4
    assert max(ratios(tmp_path / "run").values()) < RIGHT
    _healthy(tmp_path / "run")


def test_closures_are_witnessed_at_each_evaluation(tmp_path: Path) -> None:
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for batch in _batches(2):

            def closure(batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = _loss(model, batch)
                loss.backward()
                return loss

            optimizer.step(closure)

    assert max(ratios(tmp_path / "run").values()) < RIGHT
    _healthy(tmp_path / "run")


@pytest.mark.parametrize("clears", [False, True])
def test_clipping_before_a_closure_is_no_further_evaluation_and_clearing_is(tmp_path: Path, clears: bool) -> None:
    """Lightning gives `step` a closure that does nothing if the training computes gradients itself."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=(*OBSERVED, "replay"), strict=True):
        for batch in _batches(3):

            def closure(batch: Tensor = batch) -> None:
                if clears:
                    _loss(model, batch).backward()

            optimizer.zero_grad()
            _loss(model, batch).backward()
            if clears:
                optimizer.zero_grad(set_to_none=False)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step(closure)  # type: ignore[arg-type]

    verdict = traindiff.check(tmp_path / "run")
    assert verdict.verdict == "healthy", str(verdict)
    assert any(note.startswith("Some steps evaluate the loss several times") for note in verdict.notes) == clears
    assert any("is not replayed" in note for note in verdict.notes) == clears
    assert any(note.startswith("Witnessed are the gradients of 100.0%") for note in verdict.notes)


@pytest.mark.parametrize("every", [2, 3])
def test_steps_that_are_not_recorded_count_for_nothing(tmp_path: Path, every: int) -> None:
    path = record(tmp_path / "run", _model(), _batches(8), _loss, every=every)

    assert max(ratios(path).values()) < RIGHT
    assert reasons(path) == {}
    _healthy(path)


def test_a_gradient_that_held_something_before_the_first_recorded_step_is_not_judged(tmp_path: Path) -> None:
    path = record(tmp_path / "run", _model(), _batches(4), _loss, every=2, zero=False)

    assert "before the first backward pass" in reasons(path)["0.weight"]
    _healthy(path)


@pytest.mark.parametrize("scaled", [True, False])
def test_a_loss_scale_and_clipping_are_divided_out(tmp_path: Path, *, scaled: bool) -> None:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, enabled=scaled)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for batch in _batches(3):
            scaler.scale(_loss(model, batch)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    assert max(ratios(tmp_path / "run").values()) < RIGHT
    assert len(ratios(tmp_path / "run")) == 7
    _healthy(tmp_path / "run")


def test_the_training_is_not_changed(tmp_path: Path) -> None:
    def trained(path: Path | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())
        recorder = traindiff.record(path, model, optimizer, observe="witness", strict=True) if path else None
        for batch in _batches(3):
            _loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        if recorder:
            recorder.close()
        return [*model.parameters(), torch.random.get_rng_state()]

    plain, recorded = trained(None), trained(tmp_path / "run")
    assert all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True))
    assert F.linear.__module__.startswith("torch")
    assert F.linear is torch._C._nn.linear


def _clip_norm(model: nn.Module, step: int) -> None:  # noqa: ARG001
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _clip_value(model: nn.Module, step: int) -> None:  # noqa: ARG001
    nn.utils.clip_grad_value_(model.parameters(), 1e-4)


@pytest.mark.parametrize("clip", [_clip_norm, _clip_value])
def test_gradients_are_read_before_they_are_clipped_also_in_the_first_step_of_an_optimizer_that_was_not_given(
    tmp_path: Path, clip: Callable[[nn.Module, int], None]
) -> None:
    path = record(tmp_path / "run", _model(), _batches(2), _loss, change=clip, given=False)

    assert [len(step) for step in gradients(path)] == [7, 7]
    assert max(ratios(path).values()) < RIGHT
    _healthy(path)


def test_gradients_that_are_clipped_by_hand_in_the_first_step_of_an_optimizer_that_was_not_given_are_a_note(
    tmp_path: Path,
) -> None:
    def clip(model: nn.Module, step: int) -> None:  # noqa: ARG001
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.1)

    path = record(tmp_path / "run", _model(), _batches(2), _loss, change=clip, given=False)

    _healthy(path)
    notes = traindiff.check(str(path), rules="wrong-gradient").notes
    assert notes[0] == "The training multiplies all gradients by one factor after the backward pass (2 steps, first 0)."


@pytest.mark.parametrize("together", [False, True])
def test_several_optimizers_that_were_not_given_are_each_known_before_their_gradients_are_clipped(
    tmp_path: Path, together: bool
) -> None:
    model = _model()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in (model[:2], model[2:])]
    with traindiff.record(tmp_path / "run", model, observe=OBSERVED, strict=True):
        for batch in _batches(2):
            _loss(model, batch).backward()
            if together:  # which of the two will step is not known
                _clip_norm(model, 0)
            for part, optimizer in zip((model[:2], model[2:]), optimizers, strict=True):
                if not together:
                    _clip_norm(part, 0)
                optimizer.step()
                optimizer.zero_grad()

    _healthy(tmp_path / "run")
    if not together:
        assert len(ratios(tmp_path / "run")) == 7
        assert max(ratios(tmp_path / "run").values()) < RIGHT


def test_what_is_not_witnessed_is_said_of_the_last_evaluation_of_a_step(tmp_path: Path) -> None:
    model, (batch,) = _model(), _batches(1)
    name, hooked = next(iter(model.named_parameters()))
    hooked.register_post_accumulate_grad_hook(lambda _: None)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        return loss

    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        optimizer.step(closure)

    notes = traindiff.check(str(tmp_path / "run"), rules="wrong-gradient").notes
    assert any(note.startswith(f"Not witnessed: {name}") for note in notes), notes


@pytest.mark.parametrize("given", [False, True])
def test_a_gradient_that_grew_in_the_micro_step_before_was_not_there_before_the_recording(
    tmp_path: Path, given: bool
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(6, 2), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(x) * self.scale
            return found

    path = record(tmp_path / "run", Scaled(), _batches(4), _loss, per_step=2, given=given)

    assert reasons(path) == {}
    assert set(ratios(path)) == {"layer.weight", "layer.bias", "scale"}
    assert max(ratios(path).values()) < RIGHT
