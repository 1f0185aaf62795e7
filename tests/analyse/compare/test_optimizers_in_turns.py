"""Two optimizers that step in turns: what a round was given comes before what the first step of it computes."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff


class Gan(nn.Module):
    """A generator, which is listed first, and a discriminator, which steps first."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def round(
        self, optimizers: list[torch.optim.Optimizer], num_steps: int, fault: str, *, leaves_out: bool = False
    ) -> None:
        """Steps of the discriminator, and one of the generator."""
        of_generator, of_discriminator = optimizers
        for _ in range(num_steps):
            of_discriminator.zero_grad()
            made = self.generator(torch.randn(6, 3)).detach()
            (self.discriminator(made).mean() - self.discriminator(torch.randn(6, 4)).tanh().mean()).backward()
            multiply(self.discriminator, fault == "discriminator")
            of_discriminator.step()
        of_generator.zero_grad()
        (-self.discriminator(self.generator(torch.randn(6, 3))).mean()).backward()
        multiply(self.generator, fault == "generator")
        if not leaves_out:
            of_generator.step()


def multiply(model: nn.Module, wrong: bool) -> None:
    """A gradient that is wrong by one percent."""
    gradient = next(model.parameters()).grad
    assert gradient is not None
    if wrong:
        gradient.mul_(1.01)


def trained(
    path: Path, *, seed: int = 0, num_steps: int = 1, other_data_from: int = 9, fault: str = "", fault_from: int = 2
) -> Path:
    """A recording of four rounds."""
    torch.manual_seed(seed)
    model = Gan()
    parts = (model.generator, model.discriminator)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]
    torch.manual_seed(5)
    with traindiff.record(path, model, optimizers):
        for number in range(4):
            if number == other_data_from:
                torch.manual_seed(77)
            model.round(optimizers, num_steps, fault if number >= fault_from else "")
    return path


@pytest.mark.parametrize("num_steps", [1, 2])
def test_another_seed_is_another_training_and_no_wrong_gradient(tmp_path: Path, num_steps: int) -> None:
    baseline = trained(tmp_path / "baseline", num_steps=num_steps)
    found = traindiff.compare(baseline, trained(tmp_path / "candidate", seed=1, num_steps=num_steps))
    first, bits = found.findings[0], found.first_bit_difference
    assert found.verdict == "misaligned"
    assert (first.step, first.kind, first.path) == (0, "initial-parameter", "generator.0.weight")
    assert bits is not None
    assert (bits.phase, bits.stage, bits.path) == ("param", "before", "generator.0.weight")
    assert "discriminator.0.weight" in {one.path for one in found.findings if one.kind == "initial-parameter"}


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("begin", [0, 1, 2])
def test_other_data_are_another_batch_and_no_wrong_gradient(tmp_path: Path, num_steps: int, begin: int) -> None:
    baseline = trained(tmp_path / "baseline", num_steps=num_steps)
    found = traindiff.compare(baseline, trained(tmp_path / "candidate", num_steps=num_steps, other_data_from=begin))
    first = found.findings[0]
    assert found.verdict == "misaligned"
    assert (first.step, first.kind) == (begin, "batch")


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("part", ["generator", "discriminator"])
def test_a_wrong_gradient_of_either_is_found_where_it_is(tmp_path: Path, num_steps: int, part: str) -> None:
    baseline = trained(tmp_path / "baseline", num_steps=num_steps)
    found = traindiff.compare(baseline, trained(tmp_path / "candidate", num_steps=num_steps, fault=part))
    first = found.findings[0]
    assert found.verdict == "diverged"
    assert (first.phase, first.path) == ("grad", f"{part}.0.weight")
    assert first.step == (2 if part == "generator" else 2 * num_steps)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_wrong_gradient_before_other_data_comes_first(tmp_path: Path, num_steps: int) -> None:
    baseline = trained(tmp_path / "baseline", num_steps=num_steps)
    faulty = trained(tmp_path / "candidate", num_steps=num_steps, fault="discriminator", other_data_from=3)
    found = traindiff.compare(baseline, faulty)
    assert found.verdict == "diverged"
    assert (found.findings[0].step, found.findings[0].path) == (2 * num_steps, "discriminator.0.weight")


@pytest.mark.parametrize("num_steps", [2, 3, 70])
@pytest.mark.parametrize("listed", [(0, 1), (1, 0)])
def test_a_step_of_the_generator_that_is_left_out_is_named(
    listed: tuple[int, int], num_steps: int, tmp_path: Path
) -> None:
    for path, left_out in ((tmp_path / "baseline", 9), (tmp_path / "candidate", 1)):
        torch.manual_seed(0)
        model = Gan()
        parts = (model.generator, model.discriminator)
        optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]
        with traindiff.record(path, model, [optimizers[number] for number in listed]):
            for number in range(3):
                model.round(optimizers, num_steps, "", leaves_out=number == left_out)
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").findings[0]
    assert (first.kind, first.path) == ("turn", f"optimizer[{listed.index(0)}]")
    assert (first.evidence["baseline"], first.evidence["candidate"]) == (2, 1)
    assert first.message.endswith("the candidate leaves out a step.")


def halves_in_turns(model: nn.Module) -> Callable[[int, Tensor], None]:
    """Rounds in which two optimizers, of a half of the parameters each, take turns."""
    parameters = list(model.parameters())
    optimizers = [torch.optim.Adam(half, lr=1e-2) for half in (parameters[:2], parameters[2:])]

    def round_of(number: int, batch: Tensor) -> None:
        model.zero_grad()
        model(batch).sub(1).square().mean().backward()
        optimizers[number % 2].step()

    round_of.optimizers = optimizers  # type: ignore[attr-defined]
    return round_of


def test_a_run_that_begins_with_the_other_optimizer_finds_what_that_one_left(tmp_path: Path) -> None:
    for path, begin in ((tmp_path / "baseline", 0), (tmp_path / "candidate", 3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
        round_of = halves_in_turns(model)
        for number in range(begin):
            round_of(number, torch.randn(6, 3))
        with traindiff.record(path, model, round_of.optimizers):  # type: ignore[attr-defined]
            for number in range(begin, 8):
                round_of(number, torch.randn(6, 3))
    assert traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").verdict == "identical"


def critics(path: Path, *, begin: int = 0, factor: float = 1.0, actor_first: bool = False) -> Path:
    """A recording of a critic and an actor, which steps second; targets are averages that change between rounds."""
    torch.manual_seed(0)
    actor, critic = (nn.Sequential(nn.Linear(width, 8), nn.ReLU(), nn.Linear(8, 2)) for width in (3, 5))
    targets = deepcopy(nn.ModuleList([actor, critic])).requires_grad_(False)
    model = nn.ModuleDict({"critic": critic, "actor": actor, "targets": targets})
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in (critic, actor)]
    recorder = None
    for number in range(6):
        if number == begin:
            recorder = traindiff.record(path, model, optimizers[::-1] if actor_first else optimizers)
        states, actions, after = torch.randn(6, 3), torch.randn(6, 2), torch.randn(6, 3)
        with torch.no_grad():
            wanted = 0.9 * targets[1](torch.cat([after, targets[0](after)], 1))
        optimizers[0].zero_grad()
        (critic(torch.cat([states, actions], 1)) - wanted - 1.0).square().mean().backward()
        gradient = next(critic.parameters()).grad
        assert gradient is not None
        gradient.mul_(factor if number > 3 else 1.0)
        optimizers[0].step()
        optimizers[1].zero_grad()
        (-critic(torch.cat([states, actor(states)], 1)).mean()).backward()
        optimizers[1].step()
        with torch.no_grad():
            for average, latest in zip(targets.parameters(), [*actor.parameters(), *critic.parameters()], strict=True):
                average.lerp_(latest, 0.05)
    assert recorder is not None
    recorder.close()
    return path


@pytest.mark.parametrize("actor_first", [True, False])
@pytest.mark.parametrize(("factor", "verdict"), [(1.0, "identical"), (1.01, "diverged"), (0.99, "diverged")])
def test_a_run_that_goes_on_after_its_averages_changed_begins_there(
    factor: float, verdict: str, actor_first: bool, tmp_path: Path
) -> None:
    whole = critics(tmp_path / "whole", actor_first=actor_first)
    found = traindiff.compare(whole, critics(tmp_path / "rest", begin=3, factor=factor, actor_first=actor_first))
    assert found.verdict == verdict, str(found)
    if found.findings:
        assert (found.findings[0].step, found.findings[0].phase, found.findings[0].path) == (
            4,
            "grad",
            "critic.0.weight",
        )


def going_on(path: Path, *, begin: int = 0, first_of_generator: int = 0, unloaded: bool = False) -> Path:
    """A recording of six rounds, or of those from one on, whose checkpoint may lack the discriminator."""
    torch.manual_seed(0)
    model = Gan()
    initial = deepcopy(model.discriminator.state_dict())
    parts = [model.generator, model.discriminator] if first_of_generator else [model.discriminator, model.generator]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]
    of_generator, of_discriminator = optimizers if first_of_generator else optimizers[::-1]
    recorder = None
    for number in range(6):
        if number == begin:
            if unloaded:
                model.discriminator.load_state_dict(initial)
            recorder = traindiff.record(path, nn.ModuleList(parts), optimizers)
        for _ in range(2):
            of_discriminator.zero_grad()
            made = model.generator(torch.randn(6, 3)).detach()
            (model.discriminator(made).mean() - model.discriminator(torch.randn(6, 4)).tanh().mean()).backward()
            of_discriminator.step()
        if number >= first_of_generator:
            of_generator.zero_grad()
            (-model.discriminator(model.generator(torch.randn(6, 3))).mean()).backward()
            of_generator.step()
    assert recorder is not None
    recorder.close()
    return path


@pytest.mark.parametrize(("first_of_generator", "path"), [(0, "0.0.weight"), (1, "1.0.weight")])
def test_what_was_not_loaded_is_named_whichever_optimizer_is_listed_first(
    first_of_generator: int, path: str, tmp_path: Path
) -> None:
    whole = going_on(tmp_path / "whole", first_of_generator=first_of_generator)
    unloaded = going_on(tmp_path / "rest", begin=3, first_of_generator=first_of_generator, unloaded=True)
    found = traindiff.compare(whole, unloaded)
    assert (found.verdict, found.findings[0].kind, found.findings[0].path) == ("misaligned", "initial-parameter", path)
    loaded = going_on(tmp_path / "loaded", begin=3, first_of_generator=first_of_generator)
    assert traindiff.compare(whole, loaded).verdict == "identical"


def test_a_run_that_goes_on_before_the_first_optimizer_has_stepped_is_no_other_training(tmp_path: Path) -> None:
    whole = going_on(tmp_path / "whole", first_of_generator=3)
    found = traindiff.compare(whole, going_on(tmp_path / "rest", begin=2, first_of_generator=3))
    assert found.verdict in ("identical", "equivalent"), str(found)
