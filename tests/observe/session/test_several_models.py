"""Several models by name, and models whose parts the training loop calls one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import traindiff
from traindiff.core.observation import Observation
from traindiff.core.settings import record_settings
from traindiff.observe.torch.session.models import called_of, distinct, outermost_around, trained_parts, unwrapped
from traindiff.observe.torch.session.record import recorder_of
from traindiff.observe.torch.session.targets import find_targets
from traindiff.storage import open_recording


def pair() -> tuple[nn.Sequential, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4)), nn.Linear(4, 1)


def observations(path: Path) -> list[Observation]:
    return [one for step in open_recording(str(path)).steps(0) for one in step.observations]


def sites(path: Path) -> set[tuple[str, str, str]]:
    return {(one.phase, one.path, one.slot) for one in observations(path)}


def train(generator: nn.Module, discriminator: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
    noise = torch.Generator().manual_seed(1)
    for _ in range(3):
        made = generator(torch.randn(6, 3, generator=noise))
        images = torch.cat([torch.randn(6, 4, generator=noise), made.detach()])
        discriminator(images).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        (-discriminator(made).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()


def recorded(path: Path, *, one_ulp: bool = False, leaky: bool = False) -> None:
    generator, discriminator = pair()
    if leaky:
        generator[1] = nn.LeakyReLU(0.01)
    if one_ulp:
        with torch.no_grad():
            weight = generator.get_parameter("2.weight")
            weight.copy_(torch.nextafter(weight, torch.tensor(torch.inf)))
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Adam(one.parameters(), lr=1e-2) for one in (discriminator, generator)
    ]
    with traindiff.record(path, {"generator": generator, "discriminator": discriminator}, optimizers):
        train(generator, discriminator, optimizers)


def test_paths_begin_with_the_names_of_the_models(tmp_path: Path) -> None:
    recorded(tmp_path / "run")

    assert {
        ("batch", "generator", "input[0]"), ("forward", "generator.0", "output[0]"),
        ("forward", "generator", "output[0]"), ("backward", "discriminator", "output[0]"),
        ("grad", "generator.2.weight", "grad"), ("optimizer", "discriminator.bias", "exp_avg"),
        ("param", "discriminator.weight", "value"),
    } <= sites(tmp_path / "run")  # fmt: skip
    content = open_recording(str(tmp_path / "run")).rank_content(0)
    assert content["model"] == "Sequential, Linear"
    assert "" not in content["modules"]


def test_what_a_generator_made_is_no_batch_of_its_discriminator(tmp_path: Path) -> None:
    recorded(tmp_path / "baseline")
    recorded(tmp_path / "candidate", one_ulp=True)
    inputs = {
        one.phase
        for one in observations(tmp_path / "baseline")
        if (one.path, one.slot) == ("discriminator", "input[0]")
    }

    assert inputs == {"forward"}
    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")
    assert {one.kind for one in found.findings} <= {"initial-parameter"}


def test_turns_of_a_gan_are_no_micro_steps_and_the_first_fault_is_where_it_is(tmp_path: Path) -> None:
    recorded(tmp_path / "baseline")
    recorded(tmp_path / "candidate", leaky=True)
    seen = observations(tmp_path / "baseline")

    assert {one.micro_step for one in seen} == {0}
    calls = [
        one.call
        for one in seen
        if (one.step, one.phase, one.path) == (1, "forward", "discriminator") and one.slot == "output[0]"
    ]
    assert calls == [0, 1]
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence
    assert first is not None
    assert (first.step, first.phase, first.site) == (0, "forward", "generator.1 output[0]")


def test_the_same_training_is_the_same_recording(tmp_path: Path) -> None:
    for name in ("baseline", "candidate"):
        recorded(tmp_path / name)

    assert traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").verdict == "identical"


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ({}, "is empty: nothing would be recorded."),
        ({"a.b": nn.Linear(1, 1)}, "is no name for a model."),
        ({"module": nn.Linear(1, 1)}, "is no name for a model."),
        ({"eval": nn.Linear(1, 1)}, "is no name for a model."),
        ({"model": 3}, "is an int, not a torch.nn.Module."),
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, models: dict[str, Any], message: str) -> None:
    with pytest.raises(traindiff.ConfigError) as error:
        traindiff.record(tmp_path / "run", models)
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


class Task(nn.Module):
    """Is never called; its parts are, one inside a checkpoint, and one calls another."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(4, 2)])
        self.outer = Outer(self.heads[0])
        self.judge = nn.MSELoss()

    def step(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.encoder, x, use_reentrant=False)
        return self.judge(self.outer(hidden), torch.ones(len(x), 2))  # type: ignore[no-any-return]


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale  # type: ignore[no-any-return]


def test_calls_inside_another_and_calls_made_again_are_part_of_the_forward_pass(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = Task()
    settings = record_settings()
    optimizer = torch.optim.SGD(task.parameters(), lr=0.1)
    targets = find_targets(task, None, select=("*",), called=[task, *trained_parts(task)])
    with recorder_of(str(tmp_path / "run"), targets, settings, overwrite=False):
        for _ in range(2):
            for _ in range(2):
                task.step(torch.randn(5, 3)).backward()
            optimizer.step()
            with torch.no_grad():
                task.step(torch.randn(5, 3))
    seen = observations(tmp_path / "run")

    batches = [
        (one.step, one.micro_step, one.path)
        for one in seen
        if one.phase == "batch" and one.slot == "input[0]" and not one.stage
    ]
    assert batches == [(step, micro_step, "encoder") for step in (0, 1) for micro_step in (0, 1)]
    assert [one.micro_step for one in seen if one.phase == "loss" and one.step == 1] == [0, 1]
    assert {
        ("forward", "outer", "input[0]"),
        ("forward", "heads.0", "output[0]"),
        ("forward", "judge", "output[0]"),
    } <= sites(tmp_path / "run")
    assert max(one.step for one in seen) == 1


def test_what_is_called_of_a_model_is_the_model_or_the_outermost_of_its_parts() -> None:
    task = Task()

    assert [type(one).__name__ for one in trained_parts(task)] == ["Sequential", "Linear", "Outer"]
    assert called_of(task) == [task, *trained_parts(task)]
    assert called_of(task.encoder) == [task.encoder]
    assert called_of(task, task.encoder[0])[-1] is task.encoder[0]


def test_of_models_with_the_same_parameters_the_one_that_is_called_counts() -> None:
    model, part = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.Linear(2, 2)
    part.weight, part.bias = model[0].weight, model[0].bias  # type: ignore[assignment]
    first, second, other = nn.Sequential(model), nn.Sequential(model), nn.Linear(1, 1)

    assert distinct([part, first, second, other], called=second) == [second, other]
    assert distinct([part, first, second, other], called=first) == [first, other]
    assert distinct([part, other]) == [part, other]


def test_wrappers_around_a_model_are_found() -> None:
    model = nn.Linear(2, 2)
    wrapper: Any = torch.compile(model, backend="eager")

    assert outermost_around(model) is wrapper
    assert outermost_around(wrapper) is wrapper
    assert unwrapped(wrapper) is model


class Autoencoder(nn.Module):
    """A model whose loss is a method, which calls its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 2), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def loss(self, x: Tensor) -> Tensor:
        return (self.decoder(torch.tanh(self.encoder(x))) - x).square().mean()


def autoencoded(path: Path, *, data: int = 0, weights: int = 0, parts: bool = True, micro_batches: int = 1) -> None:
    torch.manual_seed(weights)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(data)
    with traindiff.record(path, model, optimizer, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            for batch in torch.randn(8, 3, generator=generator).chunk(micro_batches):
                loss = model.loss(batch) if parts else model.decoder(model(batch)[:, :2]).square().mean()
                (loss / micro_batches).backward()
            optimizer.step()


def test_parts_that_the_loop_calls_in_place_of_the_model_are_given_the_batch(tmp_path: Path) -> None:
    autoencoded(tmp_path / "run")

    found = sites(tmp_path / "run")
    assert {("batch", "encoder", "input[0]"), ("forward", "decoder", "input[0]"), ("batch", "rng", "cpu")} <= found
    assert ("batch", "decoder", "input[0]") not in found
    before = [one for one in observations(tmp_path / "run") if (one.phase, one.stage) == ("param", "before")]
    assert {one.path for one in before} == {
        "encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"
    }  # fmt: skip


@pytest.mark.parametrize(("changed", "kind"), [({"data": 1}, "batch"), ({"weights": 1}, "initial-parameter")])
def test_other_batches_or_weights_of_such_a_loop_are_misaligned(
    changed: dict[str, int], kind: str, tmp_path: Path
) -> None:
    autoencoded(tmp_path / "baseline")
    autoencoded(tmp_path / "candidate", **changed)

    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert found.verdict == "misaligned"
    assert found.first_divergence is not None
    assert found.first_divergence.kind == kind


def test_micro_batches_of_such_a_loop_merge_to_its_batch(tmp_path: Path) -> None:
    autoencoded(tmp_path / "baseline")
    autoencoded(tmp_path / "candidate", micro_batches=2)

    assert {one.micro_step for one in observations(tmp_path / "candidate")} == {0, 1}
    assert traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").verdict == "equivalent"


def test_a_part_that_is_called_after_the_model_is_no_further_forward_pass(tmp_path: Path) -> None:
    autoencoded(tmp_path / "run", parts=False)

    found = sites(tmp_path / "run")
    assert ("batch", "", "input[0]") in found
    assert not {one for one in found if one[1:] == ("decoder", "input[0]")}
    assert {one.call for one in observations(tmp_path / "run") if one.path == "decoder" and one.phase == "forward"} == {
        0, 1
    }  # fmt: skip


def thought_unseen(path: Path) -> set[tuple[int, str]]:
    """Steps and paths of modules that may have been called without their hooks."""
    return {
        (number, one.path)
        for number, step in enumerate(open_recording(str(path)).steps(0))
        for one in step.observations
        if "although its parameters got gradients" in one.unobserved
    }


def test_a_model_that_rests_for_a_step_is_not_called_unseen_because_its_old_gradients_are_still_there(
    tmp_path: Path,
) -> None:
    """Each optimizer clears its own gradients, when its turn comes: an actor that learns in every second step."""
    torch.manual_seed(0)
    critic, actor = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), nn.Sequential(nn.Linear(4, 4))
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (critic, actor))
    with traindiff.record(tmp_path / "run", {"critic": critic, "actor": actor}, [ours, theirs], strict=True):
        for number in range(6):
            x = torch.randn(3, 4)
            critic(x).square().mean().backward()
            ours.step()
            ours.zero_grad()
            if number % 2:
                theirs.zero_grad()
                critic(actor(x)).mean().backward()
                theirs.step()
                ours.zero_grad()

    assert not thought_unseen(tmp_path / "run")


def test_a_model_that_is_called_unseen_is_told_of_by_its_new_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    critic, actor = nn.Linear(4, 1), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*critic.parameters(), *actor.parameters()], lr=0.01)
    with traindiff.record(tmp_path / "run", {"critic": critic, "actor": actor}, optimizer, strict=True):
        for number in range(4):
            act = actor if number != 2 else actor.forward
            critic(act(torch.randn(3, 4))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=number != 1)

    assert thought_unseen(tmp_path / "run") == {(2, "actor")}
