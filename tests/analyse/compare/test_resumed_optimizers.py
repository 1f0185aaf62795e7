"""Runs of two optimizers that go on where another run was, or that recorded other steps of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import traindiff
from traindiff.observe.torch.hooks.model_state import ModelStateTap

Saved = Mapping[str, Any]


class Pair:
    """A generator and a discriminator, which steps before it, and whose weights are clipped to a limit."""

    def __init__(self, num_critic: int = 1, limit: float | None = 0.3) -> None:
        torch.manual_seed(0)
        self.num_critic, self.limit = num_critic, limit
        self.models = {"generator": nn.Linear(3, 4), "discriminator": nn.Linear(4, 1)}
        self.optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in self.models.items()}

    def save(self) -> Saved:
        return copy.deepcopy({
            name: (model.state_dict(), self.optimizers[name].state_dict()) for name, model in self.models.items()
        })  # fmt: skip

    def load(self, saved: Saved) -> None:
        for name, (model, optimizer) in saved.items():
            self.models[name].load_state_dict(model)
            self.optimizers[name].load_state_dict(optimizer)

    def train(self, first: int, last: int) -> None:
        generator, discriminator = self.models.values()
        for step in range(first, last):
            numbers = torch.Generator().manual_seed(step)
            for _ in range(self.num_critic):
                made = generator(torch.randn(8, 3, generator=numbers))
                real = discriminator(torch.randn(8, 4, generator=numbers))
                (discriminator(made.detach()).square() + (real - 1.0).square()).mean().backward()
                self.step("discriminator")
                with torch.no_grad():
                    if self.limit is not None:
                        discriminator.weight.clamp_(-self.limit, self.limit)
            (discriminator(made) - 1.0).square().mean().backward()
            self.step("generator")

    def step(self, name: str) -> None:
        self.optimizers[name].step()
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()


@pytest.mark.parametrize(("every", "num_critic"), [(1, 1), (2, 1), (1, 3)])
@pytest.mark.parametrize("lost", ["", "discriminator", "generator"])
def test_a_run_goes_on_although_its_second_optimizer_steps_first(
    every: int, num_critic: int, lost: str, tmp_path: Path
) -> None:
    begun, resumed = Pair(num_critic), Pair(num_critic)

    with traindiff.record(tmp_path / "baseline", begun.models, [*begun.optimizers.values()], every=every):
        begun.train(0, 4)
        saved = begun.save()
        begun.train(4, 8)
    resumed.load({**saved, **({lost: (saved[lost][0], Pair().save()[lost][1])} if lost else {})})
    with traindiff.record(tmp_path / "resumed", resumed.models, [*resumed.optimizers.values()], every=every):
        resumed.train(4, 8)
    comparison = traindiff.compare(tmp_path / "baseline", tmp_path / "resumed")

    first = comparison.first_divergence
    assert (min(comparison.steps), max(comparison.steps)) == (4, 8 * num_critic - every)
    if not lost:
        assert (comparison.verdict, first) == ("identical", None)
    else:
        assert first is not None
        assert (first.step, first.slot) == (4 * num_critic if lost == "discriminator" else 4, "step")
        assert first.path.startswith(lost)


@pytest.mark.parametrize("num_critic", [1, 2])
@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_clipped_weights_do_not_tell_a_run_from_itself_where_other_steps_were_recorded(
    first: str, num_critic: int, tmp_path: Path
) -> None:
    for every in (1, 2):
        pair = Pair(num_critic)
        optimizers = sorted(pair.optimizers.items(), key=lambda one: one[0] != first)
        with traindiff.record(tmp_path / f"{every}", pair.models, [one for _, one in optimizers], every=every):
            pair.train(0, 6)

    for baseline, candidate in ((1, 2), (2, 1)):
        assert traindiff.compare(tmp_path / f"{baseline}", tmp_path / f"{candidate}").verdict == "identical"


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("clipped", [True, False])
def test_an_update_is_not_compared_if_one_run_alone_shows_what_was_clipped_before_it(
    clipped: bool, is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_seen:  # as on a GPU
        monkeypatch.setattr(ModelStateTap, "_may_look", False)
    for every in (1, 2):
        pair = Pair(num_critic=2, limit=0.02 if clipped or every == 1 else None)
        pair.optimizers["discriminator"].param_groups[0]["lr"] = 0.1
        with traindiff.record(tmp_path / f"{every}", pair.models, [*pair.optimizers.values()], every=every):
            pair.train(0, 6)

    comparison = traindiff.compare(tmp_path / "1", tmp_path / "2")

    assert comparison.verdict == ("identical" if clipped else "diverged")
    notes = [
        note for note in comparison.notes if note.startswith("Not compared: some updates of discriminator.weight.")
    ]
    assert len(notes) == (clipped and not is_seen)


@pytest.mark.parametrize("every", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("num_critic", [1, 3])
@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_a_run_of_two_optimizers_goes_on_between_their_rounds(
    first: str, num_critic: int, every: tuple[int, int], tmp_path: Path
) -> None:
    paths, pairs = (tmp_path / "whole", tmp_path / "resumed"), (Pair(num_critic, None), Pair(num_critic, None))
    for path, pair, number, begin in zip(paths, pairs, every, (0, 4), strict=True):
        optimizers = sorted(pair.optimizers.items(), key=lambda one: one[0] != first)
        pair.train(0, begin)
        with traindiff.record(path, pair.models, [one for _, one in optimizers], every=number):
            pair.train(begin, 8)

    comparison = traindiff.compare(*paths)

    assert (comparison.verdict, comparison.findings) == ("identical", ())
    begins = any(note.endswith("They belong to another optimizer's step before it.") for note in comparison.notes)
    assert begins == (first == "discriminator")


def test_a_run_goes_on_although_its_first_optimizer_rests_for_twenty_steps_of_the_second(tmp_path: Path) -> None:
    paths = tmp_path / "whole", tmp_path / "resumed"
    for path, begin in zip(paths, (0, 2), strict=True):
        pair = Pair(20, None)
        pair.train(0, begin)
        with traindiff.record(path, pair.models, [*pair.optimizers.values()], observe=["param", "batch"]):
            pair.train(begin, 4)

    comparison = traindiff.compare(*paths)

    assert (comparison.verdict, comparison.steps[0]) == ("identical", 40)


@pytest.mark.parametrize("first", ["generator", "discriminator"])
def test_another_gradient_of_a_run_that_goes_on_is_found_after_passes_of_its_round_before(
    first: str, tmp_path: Path
) -> None:
    paths = tmp_path / "whole", tmp_path / "resumed"
    for path, begin in zip(paths, (0, 4), strict=True):
        pair = Pair(2, None)
        optimizers = sorted(pair.optimizers.items(), key=lambda one: one[0] != first)
        pair.train(0, begin)
        if begin:
            pair.models["discriminator"].weight.register_hook(lambda gradient: 1.01 * gradient)
        with traindiff.record(path, pair.models, [one for _, one in optimizers]):
            pair.train(begin, 8)

    comparison = traindiff.compare(*paths)

    assert comparison.verdict == "diverged"
    found = comparison.first_divergence
    assert found is not None
    assert (found.step, found.phase, found.path) == (8, "grad", "discriminator.weight")
