"""Trainings as public scripts have them: nothing false is said of them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import traindiff
from tests.analyse.compare.test_detached import first_of

WITNESS = (
    "batch",
    "forward",
    "loss",
    "backward",
    "grad",
    "optimizer",
    "update",
    "param",
    "samples",
    "replay",
    "witness",
)


class Learner(nn.Module):
    """BYOL: the target is an average of the network, and the optimizer holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(576, 8))
        self.pred = nn.Linear(8, 8)
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        predicted = functional.normalize(self.pred(self.net(x)), dim=-1)
        with torch.no_grad():
            target = functional.normalize(self.target(x), dim=-1)
        return (2 - 2 * (predicted * target).sum(-1)).mean()

    def average(self) -> None:
        for current, mean in zip(self.net.parameters(), self.target.parameters(), strict=True):
            mean.data = mean.data * 0.99 + 0.01 * current.data


def by_onednn(path: Path, *, onednn: bool) -> Path:
    torch.manual_seed(0)
    model = Learner()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    with torch.backends.mkldnn.flags(enabled=onednn), traindiff.record(path, model, optimizer):
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(20, 3, 8, 8)).backward()
            optimizer.step()
            model.average()
    return path


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_averages_that_the_optimizer_holds_follow_what_they_average(tmp_path: Path) -> None:
    runs = [by_onednn(tmp_path / str(onednn), onednn=onednn) for onednn in (True, False)]

    assert traindiff.compare(*runs).verdict in ("equivalent", "identical")


def under_l1(path: Path, *, onednn: bool) -> Path:
    """The gradient of the last bias is a sum of 12,544 equal terms."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 1, 3, padding=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    with torch.backends.mkldnn.flags(enabled=onednn), traindiff.record(path, model, optimizer):
        for _ in range(3):
            images = torch.rand(16, 1, 28, 28)
            optimizer.zero_grad()
            (model(images) - images).abs().mean().backward()
            optimizer.step()
    return path


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_a_sum_of_equal_terms_is_rounded_in_one_direction(tmp_path: Path) -> None:
    runs = [under_l1(tmp_path / str(onednn), onednn=onednn) for onednn in (True, False)]

    assert traindiff.compare(*runs).verdict in ("equivalent", "identical")


def test_both_models_of_a_gan_are_witnessed(tmp_path: Path) -> None:
    """The generator runs before the step of the discriminator, and its backward pass comes after that."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.ConvTranspose2d(8, 16, 4, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    critic = nn.Sequential(nn.Linear(256, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    of_critic, of_generator = (torch.optim.Adam(one.parameters(), lr=2e-4) for one in (critic, generator))
    models, optimizers = {"critic": critic, "generator": generator}, {"critic": of_critic, "generator": of_generator}
    loss = nn.BCEWithLogitsLoss()
    with traindiff.record(tmp_path / "run", models, optimizers, observe=WITNESS, strict=True):
        for _ in range(6):
            of_critic.zero_grad()
            loss(critic(torch.randn(16, 256)), torch.ones(16, 1)).backward()
            made = generator(torch.randn(16, 8, 1, 1))
            loss(critic(made.detach()), torch.zeros(16, 1)).backward()
            of_critic.step()
            of_generator.zero_grad()
            loss(critic(made), torch.ones(16, 1)).backward()
            of_generator.step()

    verdict = traindiff.check(tmp_path / "run")
    assert verdict.verdict == "healthy", str(verdict)
    assert [note for note in verdict.notes if "itness" in note] == [
        "Witnessed are the gradients of 100.0% of 6,209 parameters."
    ]


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.body(x)), labels)


def divided_by_hand(path: Path, **settings: Any) -> Path:
    """Two optimizers, of which one holds one parameter; gradients are divided by the number of micro-batches."""
    torch.manual_seed(0)
    model = Two()
    head = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    body = torch.optim.SGD(model.body.parameters(), lr=0.05, momentum=0.9)
    with traindiff.record(path, model, {"head": head, "body": body}, **settings):
        for _ in range(6):
            for _ in range(2):
                model(torch.randn(8, 8), torch.randint(4, (8,))).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= 2
            head.step()
            body.step()
            model.zero_grad()
    return path


def test_gradients_that_are_all_divided_by_hand_are_a_note(tmp_path: Path) -> None:
    verdict = traindiff.check(divided_by_hand(tmp_path / "run", observe=WITNESS))

    assert (verdict.verdict, verdict.warnings) == ("healthy", ()), str(verdict)
    assert any("multiplies all gradients by one factor" in note for note in verdict.notes)


def test_a_witness_of_one_run_alone_does_not_part_two_runs(tmp_path: Path) -> None:
    alone, other = divided_by_hand(tmp_path / "one", observe=WITNESS), divided_by_hand(tmp_path / "other")

    assert traindiff.compare(alone, other).verdict == "identical"
    assert traindiff.compare(other, alone).verdict == "identical"


def test_the_last_bias_of_a_critic_with_a_penalty_gets_a_gradient(tmp_path: Path) -> None:
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4)

    def penalty(real: Tensor, made: Tensor) -> Tensor:
        share = torch.rand(16, 1)
        between = (share * real + (1 - share) * made).requires_grad_(True)
        judged = critic(between)
        (slope,) = torch.autograd.grad(judged, between, torch.ones_like(judged), create_graph=True)
        return (slope.norm(2, dim=1) - 1).square().mean()

    with traindiff.record(tmp_path / "run", critic, optimizer):
        for _ in range(8):
            real, made = torch.randn(16, 8) + 1, torch.randn(16, 8)
            optimizer.zero_grad()
            (critic(made).mean() - critic(real).mean() + 10 * penalty(real, made)).backward()
            optimizer.step()

    assert traindiff.check(tmp_path / "run", rules="no-gradient").warnings == ()


def test_the_last_bias_of_a_critic_beside_a_generator_gets_a_gradient(tmp_path: Path) -> None:
    """The steps of the critic are not those that forward and backward passes are counted by."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizers = {
        "generator": torch.optim.Adam(generator.parameters()),
        "critic": torch.optim.Adam(critic.parameters()),
    }
    with traindiff.record(tmp_path / "run", {"generator": generator, "critic": critic}, optimizers):
        for _ in range(6):
            for _ in range(2):
                made = generator(torch.randn(16, 4)).detach()
                optimizers["critic"].zero_grad()
                (critic(made).mean() - critic(torch.randn(16, 8)).mean()).backward()
                optimizers["critic"].step()
            optimizers["generator"].zero_grad()
            (-critic(generator(torch.randn(16, 4))).mean()).backward()
            optimizers["generator"].step()

    assert traindiff.check(tmp_path / "run", rules="no-gradient").warnings == ()


class Overridden(nn.Module):
    """MAML-Pytorch's learner has methods of its own in place of those of a module."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList([nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.zeros(3))])

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.vars[0], self.vars[1])

    def parameters(self) -> Iterator[nn.Parameter]:  # type: ignore[override]
        return iter(self.vars)


def test_a_model_with_parameters_of_its_own_is_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Overridden()
    optimizer = torch.optim.Adam(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()

    assert traindiff.check(tmp_path / "run").verdict == "healthy"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_values_that_are_rounded_otherwise_are_named_as_that(dtype: torch.dtype, tmp_path: Path) -> None:
    for name, factor in (("one", 1.0), ("other", 1.0 + 2e-7), ("third", 1.01)):
        torch.manual_seed(0)
        model = nn.Linear(64, 8)
        with torch.no_grad():
            model.weight *= factor
        model.to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(tmp_path / name, model, optimizer):
            model(torch.ones(4, 64, dtype=dtype)).square().mean().backward()
            optimizer.step()

    rounded = traindiff.compare(tmp_path / "one", tmp_path / "other")
    assert rounded.verdict in ("identical", "equivalent")
    assert dtype is torch.bfloat16 or "rounding alone parts weight, by up to" in " ".join(rounded.notes)
    other = first_of(tmp_path / "one", tmp_path / "third")
    assert "another seed, initialization or checkpoint?" in other.message


class Distilled(nn.Module):
    """A student and a teacher of the same size, which is called under `no_grad` and requires gradients all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        self.teacher = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x)
        return functional.mse_loss(self.student(x), target)


def test_a_teacher_that_is_called_without_gradients_was_not_forgotten(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Distilled()
    optimizer = torch.optim.Adam(model.student.parameters(), lr=1e-3)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).backward()
            optimizer.step()

    verdict = traindiff.check(tmp_path / "run")

    assert (verdict.verdict, verdict.warnings, verdict.notes) == ("healthy", (), ()), str(verdict)


class Ensemble(nn.Module):
    """Several models by `torch.func.vmap` over their stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        models = [nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(models)
        self.names = [*stacked]
        self.stacked = nn.ParameterList(nn.Parameter(one.detach()) for one in stacked.values())
        self.base = [copy.deepcopy(models[0]).to("meta")]

    def forward(self, x: Tensor) -> Any:
        def one(parameters: dict[str, Tensor], x: Tensor) -> Any:
            return torch.func.functional_call(self.base[0], parameters, (x,))

        return torch.func.vmap(one, (0, None))(dict(zip(self.names, self.stacked, strict=True)), x)


def test_an_ensemble_by_vmap_is_witnessed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Ensemble()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=WITNESS, strict=True):
        for _ in range(4):
            optimizer.zero_grad()
            labels = torch.randint(0, 3, (8,)).repeat(3)
            functional.cross_entropy(model(torch.randn(8, 8)).flatten(0, 1), labels).backward()
            optimizer.step()

    verdict = traindiff.check(tmp_path / "run")

    assert verdict.verdict == "healthy", str(verdict)
    assert verdict.notes == ("Witnessed are the gradients of 100.0% of 585 parameters.",)


def trained_critic(path: Path, *, doubled_in: int | None) -> Path:
    """A GAN whose critic takes three steps for each of the generator's."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
    models = {"generator": generator, "critic": critic}
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=1e-3) for name, model in models.items()}
    with traindiff.record(path, models, optimizers, observe=("loss", "witness"), strict=True):
        for step in range(12):
            optimizers["critic"].zero_grad()
            (critic(generator(torch.randn(8, 4)).detach()).mean() - critic(torch.randn(8, 8)).mean()).backward()
            if step == doubled_in:
                gradient: Any = critic[0].weight.grad
                gradient.data.mul_(2.0)
            optimizers["critic"].step()
            if step % 3 == 2:
                optimizers["generator"].zero_grad()
                (-critic(generator(torch.randn(8, 4))).mean()).backward()
                optimizers["generator"].step()
    return path


@pytest.mark.parametrize("step", range(1, 12, 3))
def test_each_step_of_a_critic_is_witnessed(step: int, tmp_path: Path) -> None:
    verdict = traindiff.check(trained_critic(tmp_path / "run", doubled_in=step), rules="wrong-gradient")

    assert [(one.step, one.path) for one in verdict.findings] == [(step, "critic.0.weight")], str(verdict)
    assert "Witnessed are the gradients of 100.0% of 376 parameters." in verdict.notes


def test_a_critic_that_is_right_is_healthy(tmp_path: Path) -> None:
    verdict = traindiff.check(trained_critic(tmp_path / "run", doubled_in=None))

    assert (verdict.verdict, verdict.warnings) == ("healthy", ()), str(verdict)
