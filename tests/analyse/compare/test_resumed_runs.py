"""Runs that continue the baseline from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from traindiff.analyse.compare import Comparison
from traindiff.errors import ConfigError
from traindiff.storage import open_recording

SAVED_AFTER, STEPS = 3, 6


@dataclass
class Parts:
    """A training with everything that a checkpoint has to hold."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any

    def train(self, first: int, last: int) -> None:
        """Steps `first` to `last`, the last one excluded; their batches depend on their number only."""
        for step in range(first, last):
            batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            self.model(batch).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()


def begun() -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return Parts(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))


Saved = Mapping[str, Any]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved]:
    """A recording of all steps, and what was saved in the middle."""
    path, parts = tmp_path_factory.mktemp("resumed") / "baseline", begun()
    with traindiff.record(path, parts.model, parts.optimizer):
        parts.train(0, SAVED_AFTER)
        saved = {
            "model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict(),
            "scheduler": parts.scheduler.state_dict(), "random": torch.get_rng_state(),
        }  # fmt: skip
        saved = copy.deepcopy(saved)
        parts.train(SAVED_AFTER, STEPS)
    return path, saved


Resumed = Callable[..., Comparison]


@pytest.fixture
def resumed(baseline: tuple[Path, Saved], tmp_path: Path) -> Resumed:
    """Continue the training without parts of what was saved, and compare."""
    path, saved = baseline

    def run(
        *,
        without: str = "",
        first_batch: int = SAVED_AFTER,
        first_step: int = 0,
        offset: int | None = None,
        edit: Callable[[Parts], None] = lambda _: None,
    ) -> Comparison:
        parts, held = begun(), copy.deepcopy(dict(saved))
        held["model"] = {name: value for name, value in held["model"].items() if name != without}
        parts.model.load_state_dict(held["model"], strict=False)
        if without != "optimizer":
            parts.optimizer.load_state_dict(held["optimizer"])
        if without != "scheduler":
            parts.scheduler.load_state_dict(held["scheduler"])
        if without != "random":
            torch.set_rng_state(held["random"])
        with torch.no_grad():
            edit(parts)
        with traindiff.record(tmp_path / "resumed", parts.model, parts.optimizer, first_step=first_step):
            parts.train(first_batch, first_batch + STEPS - SAVED_AFTER)
        return traindiff.compare(path, tmp_path / "resumed", offset=offset)

    return run


def test_another_layer_at_the_beginning_is_no_reason_to_ask_where_a_run_begins(tmp_path: Path) -> None:
    for name, edit in (("one", nn.init.zeros_), ("other", nn.init.ones_)):
        parts = begun()
        edit(parts.model.get_parameter("3.weight"))
        with traindiff.record(tmp_path / name, parts.model, parts.optimizer, every=3):
            parts.train(0, 6)

    comparison = traindiff.compare(tmp_path / "one", tmp_path / "other")

    assert comparison.verdict == "misaligned"
    assert not any("first_step" in note for note in comparison.notes)


@pytest.mark.parametrize(("first_step", "verdict"), [(0, "misaligned"), (4, "identical")])
def test_a_run_that_goes_on_between_recorded_steps_of_both_is_told_to_say_where(
    tmp_path: Path, first_step: int, verdict: str
) -> None:
    paths = tmp_path / "whole", tmp_path / "resumed"
    for path, first in zip(paths, (0, 4), strict=True):
        parts = begun()
        parts.train(0, first)
        with traindiff.record(path, parts.model, parts.optimizer, every=3, first_step=first_step if first else 0):
            parts.train(first, 10)

    comparison = traindiff.compare(*paths)

    assert comparison.verdict == verdict
    hints = [note for note in comparison.notes if "record it with first_step=N" in note]
    assert len(hints) == (verdict == "misaligned")


def first_words(comparison: Comparison) -> tuple[str, str, str]:
    first = comparison.first_divergence
    assert first is not None
    return comparison.verdict, first.kind, first.message


def test_a_run_whose_first_parameters_are_those_of_a_later_step_is_compared_from_there(resumed: Resumed) -> None:
    comparison = resumed()

    assert (comparison.verdict, comparison.steps) == ("identical", (3, 4, 5))
    assert comparison.notes[0] == (
        "Step 0 of the candidate begins with the parameters of the baseline's step 3, and is compared as step 3; so "
        "are the steps after it. --offset 0 compares steps by their own numbers."
    )


@pytest.mark.parametrize("first_step", [0, 4])
@pytest.mark.parametrize("turned", [False, True])
def test_frozen_layers_are_known_of_both_runs_although_only_the_first_step_of_each_shows_them(
    first_step: int, turned: bool, tmp_path: Path
) -> None:
    paths = tmp_path / "whole", tmp_path / "resumed"
    for path, first in zip(paths, (0, 4), strict=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        for step in range(8):
            if step == first:
                session = traindiff.record(path, model, optimizer, first_step=first_step if first else 0)
            model(torch.randn(16, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.close()

    comparison = traindiff.compare(*(paths[::-1] if turned else paths))

    assert (comparison.verdict, len(comparison.steps)) == ("identical", 4)


@pytest.mark.parametrize("turned", [False, True])
def test_a_run_that_says_where_it_begins_is_not_moved_because_all_its_parameters_are_constant(
    turned: bool, tmp_path: Path
) -> None:
    paths = tmp_path / "whole", tmp_path / "resumed"
    for path, first in zip(paths, (0, 4), strict=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8).requires_grad_(False), nn.Linear(8, 3))
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)

        def train(begin: int, end: int, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for step in range(begin, end):
                optimizer.zero_grad()
                model(torch.randn(16, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
                optimizer.step()

        train(0, first)
        with traindiff.record(path, model, optimizer, first_step=first, select=["1", "1.*"]):
            train(first, 8)

    comparison = traindiff.compare(*(paths[::-1] if turned else paths))

    assert (comparison.verdict, min(comparison.steps)) == ("identical", 4)


def test_a_run_that_goes_on_is_found_by_what_is_trained_although_frozen_layers_are_the_same_everywhere(
    tmp_path: Path,
) -> None:
    paths = tmp_path / "whole", tmp_path / "resumed"
    for path, first in zip(paths, (0, 4), strict=True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.PReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(8):
            if step == first:
                session = traindiff.record(path, model, optimizer)
            model(torch.randn(16, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.close()

    comparison = traindiff.compare(*paths)

    assert (comparison.verdict, comparison.steps) == ("identical", (4, 5, 6, 7))


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_weights_that_a_training_changes_after_each_step_do_not_tell_a_continued_run_apart(
    factor: float, tmp_path: Path
) -> None:
    def train(model: nn.Linear, optimizer: torch.optim.Optimizer, first: int, last: int, size: float = 1.0) -> None:
        for step in range(first, last):
            batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.weight.copy_(size * nn.functional.normalize(model.weight))

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "baseline", model, optimizer):
        train(model, optimizer, 0, SAVED_AFTER)
        saved = copy.deepcopy(model)
        train(model, optimizer, SAVED_AFTER, STEPS)
    with traindiff.record(tmp_path / "resumed", saved, optimizer := torch.optim.SGD(saved.parameters(), lr=0.1)):
        train(saved, optimizer, SAVED_AFTER, STEPS, factor)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "resumed")

    first = comparison.first_divergence
    assert comparison.steps == (3, 4, 5)
    if factor == 1.0:
        assert (comparison.verdict, first) == ("identical", None)
    else:
        assert first is not None
        assert (first.step, first.kind, first.path) == (4, "edited", "weight")


class Constants(nn.Module):
    """A fit whose parameters have one element each, as those of a Gaussian process have."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.offset, self.frozen = (nn.Parameter(torch.zeros(())) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.rate * times) + self.offset + self.frozen


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda _: None, ("identical", (3, 4, 5))),
        (lambda model: model.rate.zero_(), ("misaligned", (0, 1, 2))),
        # One number is near that of a step by chance.
        (lambda model: [one.add_(1e-4) for one in (model.rate, model.offset)], ("misaligned", (0, 1, 2))),
    ],
)
def test_a_run_whose_parameters_have_one_element_each_is_compared_from_where_it_goes_on(
    edit: Callable[[Constants], object], expected: tuple[str, tuple[int, ...]], tmp_path: Path
) -> None:
    def train(model: Constants, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for _ in range(first, last):
            optimizer.zero_grad()
            (model(torch.linspace(0, 1, 8)) - 2.0).square().mean().backward()
            optimizer.step()

    model = Constants()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "baseline", model, optimizer):
        train(model, optimizer, 0, SAVED_AFTER)
        saved = copy.deepcopy((model, optimizer.state_dict()))
        train(model, optimizer, SAVED_AFTER, STEPS)
    model, optimizer = saved[0], torch.optim.Adam(saved[0].parameters(), lr=0.1)
    optimizer.load_state_dict(saved[1])
    with torch.no_grad():
        edit(model)
    with traindiff.record(tmp_path / "resumed", model, optimizer):
        train(model, optimizer, SAVED_AFTER, STEPS)

    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "resumed")

    assert (comparison.verdict, comparison.steps) == expected


@pytest.mark.parametrize("numbered", [{"first_step": 3}, {"offset": 3}])
def test_a_run_that_is_told_where_it_begins_needs_no_search(resumed: Resumed, numbered: Mapping[str, int]) -> None:
    comparison = resumed(**numbered)

    assert (comparison.verdict, comparison.steps) == ("identical", (3, 4, 5))
    assert not any("begins with" in note for note in comparison.notes)


def rounded_otherwise(parts: Parts) -> None:
    """Part a training by rounding, as steps on other hardware, or on another number of ranks, do."""
    for parameter in parts.model.parameters():
        parameter.mul_(1.0 + 2.0**-18)
        for name in ("exp_avg", "exp_avg_sq"):
            parts.optimizer.state[parameter][name].mul_(1.0 - 2.0**-18)


def other_values(tensor: torch.Tensor) -> None:
    """Values that no training has led to; no random numbers are drawn."""
    tensor.copy_(torch.linspace(-1.0, 1.0, tensor.numel()).view_as(tensor))


def rounded_and_changed(path: str, change: Callable[[torch.Tensor], Any]) -> Callable[[Parts], None]:
    """`rounded_otherwise`, and another parameter."""

    def edit(parts: Parts) -> None:
        rounded_otherwise(parts)
        change(parts.model.get_parameter(path))

    return edit


def test_a_run_that_goes_on_where_rounding_has_parted_it_is_compared_from_there(resumed: Resumed) -> None:
    comparison = resumed(edit=rounded_otherwise)

    assert (comparison.verdict, comparison.steps) == ("equivalent", (3, 4, 5))
    assert comparison.notes[0] == (
        "Step 0 of the candidate begins with the parameters of the baseline's step 3 but for rounding, and is compared "
        "as step 3; so are the steps after it. --offset 0 compares steps by their own numbers."
    )
    assert any(note.startswith("Not judged: the steps before 3,") for note in comparison.notes)


@pytest.mark.parametrize("numbered", [{}, {"first_step": 3}, {"offset": 3}])
def test_a_parameter_that_was_not_loaded_is_named_although_rounding_has_parted_the_others(
    resumed: Resumed, numbered: Mapping[str, int]
) -> None:
    comparison = resumed(edit=rounded_and_changed("3.weight", other_values), **numbered)

    assert comparison.verdict == "misaligned"
    assert [(one.kind, one.path, one.step) for one in comparison.findings] == [("initial-parameter", "3.weight", 3)]


def test_a_parameter_that_still_has_the_bits_of_the_beginning_was_not_loaded(resumed: Resumed) -> None:
    """After three steps, it is nearer to where it should be than what counts as lost."""
    first = begun().model.get_parameter("3.bias").detach()
    comparison = resumed(edit=rounded_and_changed("3.bias", lambda one: one.copy_(first)))

    assert [(one.kind, one.path, one.step) for one in comparison.findings] == [("initial-parameter", "3.bias", 3)]


def test_a_parameter_whose_gradient_is_only_rounding_may_be_anywhere(resumed: Resumed) -> None:
    """The BatchNorm behind it takes the bias away, so its gradient is zero but for rounding, and Adam moves it."""
    comparison = resumed(edit=rounded_and_changed("0.bias", other_values))

    assert (comparison.verdict, comparison.steps) == ("equivalent", (3, 4, 5))
    assert "5 of 6 parameters of the baseline's step 3 but for rounding" in comparison.notes[0]


@pytest.mark.parametrize("numbered", [{}, {"first_step": 3}])
@pytest.mark.parametrize(("changed", "verdict"), [("", "equivalent"), ("3.weight", "misaligned")])
def test_a_run_goes_on_at_a_recorded_step_of_a_baseline_that_left_out_others(
    baseline: tuple[Path, Saved], tmp_path: Path, numbered: Mapping[str, int], changed: str, verdict: str
) -> None:
    """Such a step shows what it found, as the first step of a run does."""
    parts = begun()
    with traindiff.record(tmp_path / "b", parts.model, parts.optimizer, every=3):
        parts.train(0, STEPS)
    parts, saved = begun(), copy.deepcopy(dict(baseline[1]))
    parts.model.load_state_dict(saved["model"])
    parts.optimizer.load_state_dict(saved["optimizer"])
    parts.scheduler.load_state_dict(saved["scheduler"])
    torch.set_rng_state(saved["random"])
    with torch.no_grad():
        rounded_otherwise(parts)
        if changed:
            other_values(parts.model.get_parameter(changed))
    with traindiff.record(tmp_path / "c", parts.model, parts.optimizer, **numbered):
        parts.train(SAVED_AFTER, STEPS)
    comparison = traindiff.compare(tmp_path / "b", tmp_path / "c")

    assert (comparison.verdict, comparison.steps) == (verdict, (3,))
    assert {one.path for one in comparison.findings if one.kind == "initial-parameter"} == {changed} - {""}


@pytest.mark.parametrize(("begins", "numbered"), [(1, {}), (5, {}), (5, {"first_step": 1})])
@pytest.mark.parametrize(("changed", "verdict"), [("", "equivalent"), ("3.weight", "misaligned")])
def test_a_run_that_begins_between_two_recorded_steps_is_compared_from_the_later_one_on(
    tmp_path: Path, begins: int, changed: str, verdict: str, numbered: Mapping[str, int]
) -> None:
    """Neither the candidate says where it begins, nor a baseline that is recorded from its step 1 on."""
    parts = begun()
    parts.scheduler = torch.optim.lr_scheduler.ConstantLR(parts.optimizer, 1.0)
    first = numbered.get("first_step", 0)
    parts.train(0, first)
    with traindiff.record(tmp_path / "b", parts.model, parts.optimizer, every=3, **numbered):
        parts.train(first, begins)
        saved = copy.deepcopy((parts.model, parts.optimizer.state_dict(), torch.get_rng_state()))
        parts.train(begins, 10)
    late = begun()
    late.model.load_state_dict(saved[0].state_dict())
    late.optimizer.load_state_dict(saved[1])
    torch.set_rng_state(saved[2])
    late.scheduler = torch.optim.lr_scheduler.ConstantLR(late.optimizer, 1.0)
    with torch.no_grad():
        rounded_otherwise(late)
        if changed:
            other_values(late.model.get_parameter(changed))
    with traindiff.record(tmp_path / "c", late.model, late.optimizer):
        late.train(begins, 10)
    comparison = traindiff.compare(tmp_path / "b", tmp_path / "c")

    later = next(step for step in (3, 6, 9) if step >= begins)
    assert comparison.verdict == verdict
    if not changed:  # otherwise the steps that it takes to the next recorded one part all parameters
        assert comparison.steps[0] == later
        assert f"Step {later - begins} of the candidate begins with" in comparison.notes[0]


@pytest.mark.parametrize(("first", "second"), [(3, 0), (1, 3)])
def test_a_run_that_counts_from_0_is_placed_beside_one_that_says_where_it_begins(
    tmp_path: Path, first: int, second: int
) -> None:
    """Either run may be the one that was recorded late, and either the one that says so."""
    for name, begins, numbered in (("b", first, first if first == 3 else 0), ("c", second, second)):
        parts = begun()
        parts.train(0, begins)
        with traindiff.record(tmp_path / name, parts.model, parts.optimizer, first_step=numbered):
            parts.train(begins, 8)
    comparison = traindiff.compare(tmp_path / "b", tmp_path / "c")

    steps = (3, 4, 5, 6, 7) if first == 3 else (2, 3, 4, 5, 6)
    assert (comparison.verdict, comparison.steps) == ("identical", steps)


def test_a_run_that_says_where_it_begins_is_not_moved_to_a_step_that_changes_nothing(tmp_path: Path) -> None:
    """The first step has a learning rate of 0, as a warmup begins, and the baseline did not record the second."""
    for name, begins in (("b", 0), ("c", 1)):
        parts = begun()
        parts.scheduler = torch.optim.lr_scheduler.LambdaLR(parts.optimizer, float)
        parts.train(0, begins)
        with traindiff.record(tmp_path / name, parts.model, parts.optimizer, first_step=begins, every=3 - 2 * begins):
            parts.train(begins, 8)
    comparison = traindiff.compare(tmp_path / "b", tmp_path / "c")

    assert (comparison.verdict, comparison.steps) == ("identical", (3, 6))


def test_a_baseline_that_was_recorded_from_the_middle_on_begins_at_a_later_step_of_the_candidate(
    baseline: tuple[Path, Saved], tmp_path: Path
) -> None:
    parts = begun()
    parts.train(0, SAVED_AFTER)
    with traindiff.record(tmp_path / "late", parts.model, parts.optimizer):
        parts.train(SAVED_AFTER, STEPS)
    comparison = traindiff.compare(tmp_path / "late", baseline[0])

    assert (comparison.verdict, comparison.steps) == ("identical", (0, 1, 2))
    assert comparison.notes[0] == (
        "Step 3 of the candidate begins with the parameters of the baseline's step 0, and is compared as step 0; so "
        "are the steps after it. --offset 0 compares steps by their own numbers."
    )


def test_a_run_that_is_too_far_from_every_step_is_told_how_to_say_where_it_goes_on(resumed: Resumed) -> None:
    def far(parts: Parts) -> None:
        for parameter in parts.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))

    comparison = resumed(edit=far)

    assert (comparison.steps, first_words(comparison)[:2]) == ((0, 1, 2), ("misaligned", "initial-parameter"))
    counts = [one.message for one in comparison.findings if one.kind == "step-count"]
    assert counts[0] == (
        "The candidate's optimizer is at its step 4 for this parameter, the baseline's at its step 1. Does the "
        "candidate continue a training from a checkpoint? Then say at which step, with --offset."
    )


def test_a_run_that_begins_near_the_first_step_is_not_moved(baseline: tuple[Path, Saved], tmp_path: Path) -> None:
    parts = begun()
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.mul_(1.0 + 2.0**-18)
    with traindiff.record(tmp_path / "near", parts.model, parts.optimizer):
        parts.train(0, 2)
    comparison = traindiff.compare(baseline[0], tmp_path / "near")

    assert (comparison.steps, first_words(comparison)[:2]) == ((0, 1), ("misaligned", "initial-parameter"))


def test_an_offset_of_0_compares_steps_by_their_numbers(resumed: Resumed) -> None:
    comparison = resumed(offset=0)

    assert (comparison.steps, first_words(comparison)[:2]) == ((0, 1, 2), ("misaligned", "initial-parameter"))


def test_steps_are_numbered_from_the_first_one_on(resumed: Resumed, tmp_path: Path) -> None:
    resumed(first_step=3)
    recording = open_recording(str(tmp_path / "resumed"))

    assert [step.step for step in recording.steps(0)] == [3, 4, 5]
    assert recording.rank_content(0)["ended"]["steps"] == {"optimizer": 6}


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"])
def test_a_first_step_that_is_no_number_is_refused(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"first_step=.*\n *is not the number of a step"):
        traindiff.record(tmp_path / "refused", nn.Linear(2, 2), first_step=wrong)
    assert not (tmp_path / "refused").exists()


def test_a_scheduler_that_was_not_restored_is_named(resumed: Resumed) -> None:
    verdict, kind, message = first_words(resumed(without="optimizer"))  # whose state holds the learning rate as well

    assert (verdict, kind) == ("misaligned", "hyper-parameter")
    assert message.endswith("The baseline had this value in step 0, as if the scheduler had not been restored.")


def test_a_scheduler_alone_that_was_not_restored_shows_when_it_turns(resumed: Resumed) -> None:
    comparison = resumed(without="scheduler")

    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.slot, first.step) == ("hyper-parameter", "lr", 4)


def test_a_generator_that_was_not_restored_is_named(resumed: Resumed) -> None:
    verdict, kind, message = first_words(resumed(without="random"))

    assert (verdict, kind) == ("misaligned", "random-state")
    assert message.endswith("It is the state with which the baseline began step 0: the generator was not restored.")


def test_data_that_begins_again_is_named(resumed: Resumed) -> None:
    verdict, kind, message = first_words(resumed(first_batch=0))

    assert (verdict, kind) == ("misaligned", "batch")
    assert message.endswith("Batch 3 of the candidate is the baseline's batch 0: the data begins again.")


def test_data_that_goes_on_at_another_place_is_named(resumed: Resumed) -> None:
    assert first_words(resumed(first_batch=2))[2].endswith(
        "Batch 3 of the candidate is the baseline's batch 2: the data goes on at another place."
    )


def test_a_parameter_that_was_not_loaded_is_named(resumed: Resumed) -> None:
    comparison = resumed(without="3.weight")

    first = comparison.first_divergence
    assert first is not None
    assert (comparison.verdict, first.kind, first.path, first.step) == (
        "misaligned",
        "initial-parameter",
        "3.weight",
        3,
    )
    assert comparison.notes[0].startswith(
        "Step 0 of the candidate begins with 5 of 6 parameters of the baseline's step 3"
    )


def test_a_buffer_that_was_not_loaded_is_named(resumed: Resumed) -> None:
    comparison = resumed(without="1.running_mean")

    first = comparison.first_divergence
    assert first is not None
    assert (comparison.verdict, first.path, first.step) == ("diverged", "1.running_mean", 3)


def test_a_run_that_begins_where_the_baseline_begins_is_compared_by_its_numbers(
    baseline: tuple[Path, Saved], tmp_path: Path
) -> None:
    parts = begun()
    with traindiff.record(tmp_path / "again", parts.model, parts.optimizer):
        parts.train(0, 2)
    comparison = traindiff.compare(baseline[0], tmp_path / "again")

    assert (comparison.findings, comparison.steps) == ((), (0, 1))


def test_a_run_that_begins_nowhere_in_the_baseline_is_compared_by_its_numbers(
    baseline: tuple[Path, Saved], tmp_path: Path
) -> None:
    parts = begun()
    with torch.no_grad():
        parts.model[0].weight.mul_(2.0)  # type: ignore[operator, index, union-attr]
        parts.model[3].weight.mul_(2.0)  # type: ignore[operator, index, union-attr]
    with traindiff.record(tmp_path / "other", parts.model, parts.optimizer):
        parts.train(0, 2)
    comparison = traindiff.compare(baseline[0], tmp_path / "other")

    assert (comparison.steps, first_words(comparison)[:2]) == ((0, 1), ("misaligned", "initial-parameter"))


def test_a_run_of_its_own_that_was_recorded_late_is_no_continuation(
    baseline: tuple[Path, Saved], tmp_path: Path
) -> None:
    """Its parameters differ by rounding when its recording begins; that is no other initialization."""
    parts = begun()
    with torch.no_grad():
        for parameter in parts.model.parameters():
            parameter.mul_(1.0 + 2.0**-22)
    with traindiff.record(tmp_path / "late", parts.model, parts.optimizer, steps="3-"):
        parts.train(0, STEPS)
    comparison = traindiff.compare(baseline[0], tmp_path / "late")

    assert comparison.steps == (3, 4, 5)
    assert [one for one in comparison.findings if one.kind == "initial-parameter"] == []
