"""A training that removes hooks, or replaces what it trains, with the same bits, has not diverged."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.hooks.test_removal import MODULE_HOOKS, assert_nothing_left
from tests.observe.session import changing_training as edits
from tests.observe.session.changing_training import Edit, Model, Training, train
from traindiff.core.site import PHASES
from traindiff.core.tap_registry import OBSERVABLE
from traindiff.observe.torch.hooks.compiled import NUMBER
from traindiff.observe.torch.hooks.inert_on_copy import _NoHook
from traindiff.storage import open_recording

COMPLETE = (
    edits.clear_forward_hooks, edits.clear_hooks_of_a_layer, edits.put_copied_dicts, edits.clear_step_hooks,
    edits.clear_hooks_before_steps, edits.clear_hooks_after_steps, edits.clear_global_hooks,
    edits.clear_parameter_hooks, edits.replace_the_head, edits.replace_the_head_around_its_parameters,
    edits.replace_the_blocks_by_copies, edits.wrap_the_head, edits.replace_a_parameter, edits.assign_a_state_dict,
    edits.put_a_parameter_into_its_dict, edits.put_a_mapping_in_place_of_the_parameters_dict,
    edits.assign_a_state_dict_and_make_an_optimizer, edits.make_an_optimizer, edits.load_the_optimizer,
    edits.set_the_optimizers_state, edits.make_groups_anew, edits.wrap_step, edits.replace_a_forward, edits.set_data,
    edits.freeze_and_thaw, edits.convert_there_and_back, edits.wrap_the_model,
)  # fmt: skip
"""After these, nothing is missing."""

REMOVED = "The reason: the training removed hooks of traindiff, which attached them again."
UNHEARD = "although its parameters got gradients"
UNSEEN_STEP = "the step of the optimizer was called without the hooks of traindiff"

PARTLY = {
    edits.clear_all_module_hooks: ("in step 2", REMOVED),
    edits.clear_hooks_of_the_root: ("in step 2", REMOVED),
    edits.clear_hooks_before_the_root: ("in step 2", REMOVED),
    edits.put_empty_dicts: ("in step 2", REMOVED),
    edits.clear_everything: ("in step 2", REMOVED),
    edits.put_a_plain_dict: ("in 3 steps (2 to 4)", "put a dict in place of torch's that takes none"),
    edits.split_the_optimizer: ("in 3 steps (2 to 4)", "the optimizer that is followed no longer holds it"),
    edits.replace_step: ("in 3 steps (2 to 4)", UNSEEN_STEP),
    edits.replace_a_call: ("in 3 steps (2 to 4)", UNHEARD),
    edits.replace_the_call_of_the_root: ("in 3 steps (2 to 4)", UNHEARD),
    edits.call_forward: ("in 3 steps (2 to 4)", UNHEARD),
    edits.go_on_with_copies: ("ends after step 1", "If the training goes on with a copy of the model, record that one"),
}
"""After these something is unknown: when, and why."""


def given_or_found(changes: Iterable[Edit]) -> list[Any]:
    """Each change with an optimizer that is given and with one that is found; without a release, in turn."""
    return [
        pytest.param(edit, given, id=f"{edit.__name__}-{'given' if given else 'found'}",
                     marks=() if given == bool(number % 2) else pytest.mark.release)
        for number, edit in enumerate(changes) for given in (True, False)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    made: dict[int, Path] = {}

    def baseline(micro_batches: int = 1) -> Path:
        if micro_batches not in made:
            made[micro_batches] = tmp_path_factory.mktemp("baseline") / "run"
            train(made[micro_batches], micro_batches=micro_batches, observe=[*PHASES, "grad.micro"])
        return made[micro_batches]

    return baseline


def same_bits(one: Training, other: Training) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(baseline, candidate) for baseline, candidate in pairs)


def let_copies_keep_what_does_nothing(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(NUMBER, None)
        for of_module in MODULE_HOOKS:
            hooks = getattr(module, of_module)
            for key, hook in [*hooks.items()]:
                if isinstance(hook, _NoHook):
                    del hooks[key]
                    for about in (f"{of_module}_with_kwargs", f"{of_module}_always_called"):
                        getattr(module, about, {}).pop(key, None)


@pytest.mark.parametrize(("edit", "given"), given_or_found(COMPLETE))
def test_what_replaces_something_is_followed_from_the_next_step_on(
    edit: Edit, given: bool, tmp_path: Path, baselines: Callable[..., Path]
) -> None:
    train(tmp_path / "run", edit, given=given, observe=[*PHASES, "grad.micro"])

    comparison = traindiff.compare(baselines(), tmp_path / "run")

    assert comparison.verdict == "identical", str(comparison)
    assert comparison.steps == (0, 1, 2, 3, 4)
    assert traindiff.check(tmp_path / "run").verdict == "healthy"


@pytest.mark.parametrize(("edit", "given"), given_or_found(PARTLY))
def test_what_was_not_seen_is_unknown_and_no_difference(
    edit: Edit, given: bool, tmp_path: Path, baselines: Callable[..., Path]
) -> None:
    train(tmp_path / "run", edit, given=given, observe=[*PHASES, "grad.micro"])

    comparison = traindiff.compare(baselines(), tmp_path / "run")

    assert comparison.verdict == "incomplete", str(comparison)
    assert not comparison.findings
    when, why = PARTLY[edit]
    assert any(when in note and why in note for note in comparison.notes), comparison.notes
    assert traindiff.check(tmp_path / "run").verdict != "unhealthy"


@pytest.mark.parametrize("when", ["after forward", "after backward"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize(
    "edit",
    [
        edits.clear_all_module_hooks, edits.clear_step_hooks, edits.clear_everything, edits.make_an_optimizer,
        edits.clear_hooks_of_a_layer,
    ],
    ids=lambda edit: edit.__name__,
)  # fmt: skip
def test_hooks_may_go_at_any_moment_of_a_step(
    edit: Edit, when: str, micro_batches: int, tmp_path: Path, baselines: Callable[..., Path]
) -> None:
    train(tmp_path / "run", edit, when=when, micro_batches=micro_batches, observe=[*PHASES, "grad.micro"])

    comparison = traindiff.compare(baselines(micro_batches), tmp_path / "run")

    assert comparison.verdict in ("identical", "incomplete"), str(comparison)
    assert comparison.steps == (0, 1, 2, 3, 4)
    if when == "after forward" or edit is not edits.clear_everything:
        assert comparison.verdict == "identical", str(comparison)


def test_hooks_that_are_removed_in_every_step_leave_the_optimizers_side(
    tmp_path: Path, baselines: Callable[..., Path]
) -> None:
    clear = edits.clear_all_module_hooks
    train(tmp_path / "run", clear, also=clear)

    comparison = traindiff.compare(baselines(), tmp_path / "run")

    assert comparison.verdict == "incomplete", str(comparison)
    assert any("in 3 steps (2 to 4)" in note for note in comparison.notes)
    assert {one.phase for one in comparison.differences if one.num_steps == 5} >= {"grad", "update"}


@pytest.mark.parametrize(
    "edit",
    [edits.clear_hooks_of_a_layer, edits.put_a_plain_dict, edits.clear_all_module_hooks, edits.make_an_optimizer],
    ids=lambda edit: edit.__name__,
)
def test_a_fault_elsewhere_is_found_and_located(edit: Edit, tmp_path: Path, baselines: Callable[..., Path]) -> None:
    def edit_and_break(training: Training) -> None:
        edit(training)
        down = training.model.blocks[1].down
        down.forward = lambda x: nn.functional.linear(x, down.weight * 1.5, down.bias)

    train(tmp_path / "run", edit_and_break)

    comparison = traindiff.compare(baselines(), tmp_path / "run")

    assert comparison.verdict == "diverged", str(comparison)
    assert comparison.first_divergence is not None
    seen = edit is not edits.clear_all_module_hooks  # then the forward pass of the first such step is unknown
    assert not seen or comparison.first_divergence.path == "blocks.1.down"
    assert comparison.first_divergence.step == 2


def test_a_layer_that_a_training_takes_out_is_not_called(tmp_path: Path, baselines: Callable[..., Path]) -> None:
    def drop(training: Training) -> None:
        training.model.blocks = training.model.blocks[:1]

    train(tmp_path / "run", drop)

    comparison = traindiff.compare(baselines(), tmp_path / "run")

    assert comparison.verdict == "diverged"
    assert any(one.path.startswith("blocks.1") and one.step == 2 for one in comparison.findings)


@pytest.mark.parametrize("edit", [*COMPLETE, *PARTLY], ids=lambda edit: edit.__name__)
def test_the_training_is_the_same_and_no_hook_stays_behind(edit: Edit, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", edit, ranks=[1])  # records nothing on this rank
    before: list[Training] = []

    def edit_and_keep(training: Training) -> None:
        before.append(Training.__new__(Training))
        before[0].model, before[0].optimizer = training.model, training.optimizer
        edit(training)

    recorded = train(tmp_path / "run", edit_and_keep, observe=[*PHASES, "grad.micro"])

    assert same_bits(plain, recorded)
    for training in (recorded, before[0]):
        let_copies_keep_what_does_nothing(training.model)
        made = [training.optimizer] if isinstance(training.optimizer, torch.optim.Optimizer) else []
        assert_nothing_left(training.model, *made)


def test_hooks_of_the_training_keep_their_order(tmp_path: Path) -> None:
    calls: list[str] = []
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer):
        for step in range(3):
            if step == 1:
                edits.clear_all_module_hooks(type("Holder", (), {"model": model})())  # type: ignore[arg-type]
                for name in ("first", "second"):
                    model.head.register_forward_hook(lambda *_, name=name: calls.append(name))
                    model.register_forward_hook(lambda *_, name=name: calls.append(f"root {name}"))
            model(torch.ones(2, 4)).mean().backward()
            optimizer.step()

    assert calls == ["first", "second", "root first", "root second"] * 2
    assert len(model.head._forward_hooks) == len(model._forward_hooks) == 2


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("moment", ["before a pass", "between passes", "before the backward pass", "after it"])
@pytest.mark.parametrize("dicts", [("_forward_hooks", "_forward_pre_hooks"), ("_forward_pre_hooks",)])
def test_what_one_of_several_micro_batches_loses_is_unknown_and_no_difference(
    dicts: tuple[str, ...], moment: str, passes: int, tmp_path: Path
) -> None:
    def run(path: Path, *, clears: bool) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.Adam(model.parameters())

        def clear(when: str, at: bool = True) -> None:
            for module in model.modules() if clears and at and when == moment else ():
                for name in dicts:
                    getattr(module, name).clear()

        with traindiff.record(path, model, optimizer, observe=[*PHASES, "grad.micro"]):
            for number, batch in enumerate(torch.randn(9, 6, 4)):
                clear("before a pass", number == 4)
                outputs = []
                for number_of_pass in range(passes):
                    clear("between passes", number == 4 and number_of_pass == 1)
                    outputs.append(model(batch + number_of_pass).square().mean())
                clear("before the backward pass", number == 4)
                sum(outputs).backward()
                clear("after it", number in (3, 4))
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()

    run(tmp_path / "baseline", clears=False)
    run(tmp_path / "candidate", clears=True)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")
    nothing_is_lost = moment == "before the backward pass" or (moment == "between passes" and passes == 1)
    assert comparison.verdict == ("identical" if nothing_is_lost else "incomplete"), str(comparison)


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_wrapped_step_may_call_its_closure_until_nothing_moves(scheduled: bool, tmp_path: Path) -> None:
    """A scheduler puts its own function in place of `step`; LBFGS writes parameters between calls of the closure."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Linear(24, 4))
    inputs, targets = torch.randn(16, 8), torch.randn(16, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0) if scheduled else None

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    with traindiff.record(tmp_path / "run", model, optimizer):
        for _ in range(20):
            optimizer.step(closure)
            if scheduler is not None:
                scheduler.step()

    report = traindiff.check(tmp_path / "run")
    assert report.verdict == "healthy", str(report)
    assert len(report.steps) == 20


class Shrinking(nn.Module):
    """Loses its head while it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.head = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))

    def forward(self, x: Any) -> Any:
        x = self.body(x)
        return self.head(x) if hasattr(self, "head") else x


@pytest.mark.parametrize("observe", [None, OBSERVABLE])
@pytest.mark.parametrize("trains_the_head", [False, True])
def test_what_neither_the_model_nor_an_optimizer_holds_is_let_go_of(
    trains_the_head: bool, observe: Any, tmp_path: Path
) -> None:
    model = Shrinking()
    trained = model if trains_the_head else model.body
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    kept = {name: ref(one) for name, one in (("module", model.head[0]), ("parameter", model.head[0].weight))}
    settings = {} if observe is None else {"observe": observe}
    with traindiff.record(tmp_path / "run", model, optimizer, every=2, strict=True, **settings):
        for step in range(8):
            if step == 3:
                del model.head
            if step == 5 and trains_the_head:
                gc.collect()
                assert kept["parameter"]() is not None
                optimizer.param_groups[0]["params"] = [*model.body.parameters()]
                optimizer.state.clear()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        assert [name for name, one in kept.items() if one() is not None] == []

    found = rows(tmp_path / "run", path="head.0.weight", phase="param", slot="value")
    assert {one.step for one, _ in found if not one.unobserved} == ({0, 2, 4} if trains_the_head else {0, 2})
    described = open_recording(str(tmp_path / "run")).rank_content(0)
    assert "head.0.weight" in described["parameters"]
    assert "head.0" in described["modules"]


def test_modules_that_are_taken_out_for_a_while_are_followed_when_they_are_back(tmp_path: Path) -> None:
    model = Shrinking()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(4):
            head = model.head
            if step in (1, 2):
                del model.head
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            model.head = head

    assert [one.step for one, _ in rows(tmp_path / "run", path="head.0", phase="forward", stage="")] == [0, 3]


def test_parameters_that_are_exchanged_for_a_call_are_kept(tmp_path: Path) -> None:
    """Also if an optimizer steps inside of the call."""
    model = Shrinking()
    optimizer = torch.optim.SGD(model.body.parameters(), lr=0.1)

    def step(*_: Any) -> None:
        optimizer.step()

    with traindiff.record(tmp_path / "run", model, optimizer, strict=True, every=2):
        for _ in range(4):
            hook = model.body.register_forward_hook(step)
            exchanged = {name: one * 1 for name, one in model.head.named_parameters(prefix="head")}
            torch.func.functional_call(model, exchanged, (torch.randn(4, 3),)).sum().backward()
            hook.remove()

    assert {one.step for one, _ in rows(tmp_path / "run", path="head.0.weight", phase="param")} == {0, 2}


@pytest.mark.parametrize("observe", [None, OBSERVABLE])
def test_tensors_that_take_the_place_of_parameters_for_a_call_go_with_it(observe: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {} if observe is None else {"observe": observe}

    def adapted(start: torch.Tensor) -> tuple[float, ref[torch.Tensor]]:
        fast = start.exp()
        loss = torch.func.functional_call(model, {"0.weight": fast}, (torch.ones(2, 3),)).sum()
        return loss.item(), ref(fast)

    with traindiff.record(tmp_path / "run", model, optimizer, strict=True, **settings):
        for _ in range(2):
            _, fast = adapted(torch.ones(3, 3, requires_grad=True))
            gc.collect()
            assert fast() is None
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("wraps", [False, True])
def test_buffers_that_a_model_gets_later_are_followed(wraps: bool, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(4):
            if step == 1:
                model.add_module("norm", nn.BatchNorm1d(3))
            if step == 2:
                model.register_buffer("late", torch.ones(2))
                model[1] = nn.Sequential(model[1]) if wraps else model[1]
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found: dict[str, set[int]] = {}
    for one, _ in rows(tmp_path / "run", phase="param", slot="buffer"):
        found.setdefault(one.path, set()).add(one.step)
    assert found == {
        **{f"1.{name}": {0, 1, 2, 3} for name in ("running_mean", "running_var", "num_batches_tracked")},
        **{f"norm.{name}": {1, 2, 3} for name in ("running_mean", "running_var", "num_batches_tracked")},
        "late": {2, 3},
    }
