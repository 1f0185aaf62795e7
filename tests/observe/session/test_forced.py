"""Teacher forcing: what is overwritten, in whatever micro-batches, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.faulty_step import at_end_of_step
from tests.run.verify.recipes import Change, doubled_gradient, mlp, one_thread, other_epsilon, other_gelu
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.observe.torch.session.teacher_forcing import ForcedValues
from traindiff.run.verify.recipe import Recipe
from traindiff.run.verify.run_recipe import run_recipe


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_thread():
        yield


def run(recipe: Recipe, path: Path, *, num_steps: int = 2, **options: Any) -> str:
    return run_recipe(recipe, path, num_steps=num_steps, seed=0, asked_by="test", **options)


def findings(baseline: str, candidate: str, **options: Any) -> list[str]:
    """Phase and site of all that is found."""
    comparison = traindiff.compare(baseline, candidate, **options)
    return [f"{one.phase} {one.site}" for one in comparison.findings]


Forced = Callable[..., list[str]]


@pytest.fixture
def forced(tmp_path: Path) -> Forced:
    """What is found in a candidate that was forced to the values of the plain training."""

    def force(candidate: Recipe, baseline: Recipe | None = None) -> list[str]:
        path = run(baseline or mlp(), tmp_path / "baseline", detail="tensors")
        return findings(path, run(candidate, tmp_path / "forced", forced_by=path))

    return force


def test_a_training_that_is_forced_to_its_own_values_holds_the_same_bits(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors")

    assert traindiff.compare(path, run(mlp(), tmp_path / "forced", forced_by=path)).verdict == "identical"


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (other_gelu, ["forward 1 output[0]", "backward 0 output[0]"]),
        (other_epsilon, ["forward 2 output[0]", "backward 1 output[0]", "grad 2.weight grad"]),
    ],
)
def test_a_wrong_operation_is_found_and_nothing_that_follows_from_it(
    change: Change, wrong: list[str], forced: Forced
) -> None:
    assert forced(mlp(change)) == wrong


def other_gelu_of_renamed(model: nn.Sequential) -> None:
    model._modules["1\x1b[31m\n"] = nn.GELU(approximate="tanh")


def renamed(model: nn.Sequential) -> None:
    model._modules = {f"{name}\x1b[31m\n": module for name, module in model._modules.items()}  # type: ignore[assignment]


def test_modules_are_forced_whatever_they_are_called(forced: Forced) -> None:
    assert forced(mlp(renamed, other_gelu_of_renamed), mlp(renamed)) == [
        r"forward 1\x1b[31m\n output[0]",
        r"backward 0\x1b[31m\n output[0]",
    ]


def test_a_wrong_gradient_is_found_and_nothing_that_follows_from_it(forced: Forced) -> None:
    assert forced(mlp(before_step=doubled_gradient)) == ["grad 3.weight grad"]


def test_errors_that_cancel_are_both_found(forced: Forced) -> None:
    def canceling(model: nn.Sequential) -> None:
        model[0].register_forward_hook(lambda _, __, output: 2 * output)
        model[1].register_forward_pre_hook(lambda _, args: (args[0] / 2,))

    found = forced(mlp(canceling))

    assert "forward 0 output[0]" in found
    assert "forward 1 output[0]" in found


def test_a_wrong_update_is_found(forced: Forced) -> None:
    def recipe() -> traindiff.Training:
        training = mlp()()
        assert isinstance(training, traindiff.Training)
        assert isinstance(training.optimizer, torch.optim.Optimizer)
        weight = training.model.get_parameter("2.weight")
        at_end_of_step(training.optimizer, lambda *_: weight.data.mul_(1.001))
        return training

    found = forced(recipe)

    assert set(found) == {"update 2.weight update"}  # against the baseline, and against its own settings


def test_the_training_ends_with_the_parameters_that_it_was_forced_to(tmp_path: Path) -> None:
    kept: dict[str, nn.Module] = {}

    def keeping(name: str, recipe: Recipe) -> Recipe:
        def keep() -> Any:
            training = recipe()
            assert isinstance(training, traindiff.Training)
            kept[name] = training.model
            return training

        return keep

    path = run(keeping("baseline", mlp()), tmp_path / "baseline", detail="tensors")
    run(keeping("free", mlp(other_epsilon)), tmp_path / "free")
    run(keeping("forced", mlp(other_epsilon)), tmp_path / "forced", forced_by=path)

    expected = kept["baseline"].state_dict()
    assert not all(torch.equal(value, expected[name]) for name, value in kept["free"].state_dict().items())
    assert all(torch.equal(value, expected[name]) for name, value in kept["forced"].state_dict().items())


def test_only_the_steps_that_were_recorded_are_forced(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors", steps="1")

    comparison = traindiff.compare(path, run(mlp(other_epsilon), tmp_path / "forced", forced_by=path))

    went_its_own_way = [note for note in comparison.notes if note.startswith("Not judged: the steps before 1, ")]
    assert len(went_its_own_way) == 1, str(comparison)


def test_a_step_that_follows_a_forced_one_begins_where_the_baseline_does(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors", steps="1-2", num_steps=3)

    candidate = run(mlp(other_epsilon), tmp_path / "forced", forced_by=path, steps="1-2", num_steps=3)

    assert findings(path, candidate, steps="2") == [
        "forward 2 output[0]", "backward 1 output[0]", "grad 2.weight grad",
    ]  # fmt: skip


@pytest.mark.parametrize(("baseline", "candidate"), [(1, 4), (4, 1), (2, 4), (4, 2)])
def test_other_micro_batches_are_forced_to_their_rows(baseline: int, candidate: int, forced: Forced) -> None:
    assert forced(mlp(micro_batches=candidate), mlp(micro_batches=baseline)) == []


def test_a_fault_is_found_in_other_micro_batches(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors")

    found = findings(path, run(mlp(other_epsilon, micro_batches=4), tmp_path / "forced", forced_by=path))

    assert found == ["forward 2 output[0]", "backward 1 output[0]", "grad 2.weight grad"]


class Checkpointed(nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.block = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32, eps=epsilon), nn.GELU())
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


def test_what_is_recomputed_is_forced_like_the_first_time(forced: Forced) -> None:
    def checkpointed(epsilon: float) -> Recipe:
        def recipe() -> Any:
            model = Checkpointed(epsilon)
            optimizer = SGD(model.parameters(), lr=0.1)

            def step(batch: Tensor) -> Tensor:
                optimizer.zero_grad()
                loss = model(batch).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            return model, optimizer, torch.randn(4, 8, 6), step

        return recipe

    found = forced(checkpointed(1e-3), checkpointed(1e-5))

    assert found == ["forward block.1 output[0]", "backward block.0 output[0]", "grad block.1.weight grad"]


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors")

    with pytest.raises(traindiff.ConfigError, match=r"model\n    is compiled \(\(root\)\)"):
        run(mlp(lambda model: model.compile(backend="eager")), tmp_path / "forced", forced_by=path)


def test_a_recording_says_what_forced_it_and_which_replica_it_is(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors")

    about = traindiff.open_recording(run(mlp(), tmp_path / "forced", forced_by=path, replica="ulp:1")).run

    assert (about["forced_by"], about["settings"]["replica"]) == (path, "ulp:1")
    assert traindiff.open_recording(path).run["forced_by"] is None


def test_a_replica_of_a_forced_training_is_perturbed_at_each_operation_alone(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors")
    replica = run(mlp(), tmp_path / "replica", forced_by=path, replica="ulp:1")
    free = run(mlp(), tmp_path / "free", replica="ulp:1")

    def largest(candidate: str) -> float:
        rows = traindiff.compare(path, candidate, steps=1).differences
        return max(row.difference for row in rows if row.phase in ("forward", "backward"))

    assert 0 < largest(replica) < largest(free)


# What is put in place of a tensor, and what cannot be.


def seen(tensor: Tensor, **about: Any) -> Observation:
    defaults = {
        "step": 0, "micro_step": 0, "optimizer": "optimizer", "phase": "forward", "stage": "", "path": "fc",
        "slot": "output[0]", "call": 0, "order": 0, "dtype": "float32", "shard": Shard.whole(tuple(tensor.shape)),
    }  # fmt: skip
    return Observation(**{**defaults, **about})


@pytest.fixture
def values(tmp_path: Path) -> ForcedValues:
    model = nn.Sequential()
    model.fc = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, detail="tensors"):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return ForcedValues(traindiff.open_recording(tmp_path / "run"))


def test_a_value_is_put_in_place_without_autograds_notice(values: ForcedValues) -> None:
    tensor = torch.ones(2, 2, requires_grad=True) * 1
    version = tensor._version

    values.overwrite(tensor, seen(tensor, shard=Shard.of_batch((2, 2), first=0)))

    assert values.count == 1
    assert not torch.equal(tensor, torch.ones(2, 2))
    assert tensor._version == version
    assert tensor.grad_fn is not None


def test_what_the_recording_lacks_is_left_and_listed(values: ForcedValues) -> None:
    tensor = torch.ones(2, 2)

    values.overwrite(tensor, seen(tensor, path="other"))

    assert torch.equal(tensor, torch.ones(2, 2))
    assert values.not_forced == {"other output[0]": "the recording has no such observation"}
    assert values.count == 0


def test_parameters_that_the_step_before_left_as_they_should_be_are_not_listed(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors", num_steps=3, steps="1-2")

    forced = run(mlp(other_epsilon), tmp_path / "forced", forced_by=path, num_steps=3, steps="1-2")

    assert traindiff.open_recording(forced).rank_content(0)["not_forced"] == {}


def test_a_tensor_whose_elements_share_memory_is_left_and_listed(values: ForcedValues) -> None:
    tensor = torch.ones(1, 2).expand(2, 2)

    values.overwrite(tensor, seen(tensor))

    assert values.not_forced == {"fc output[0]": "its elements share memory"}


def test_batches_and_other_steps_are_never_touched(values: ForcedValues) -> None:
    tensor = torch.full((2, 3), 7.0)

    values.overwrite(tensor, seen(tensor, phase="batch", path="", slot="input[0]"))
    values.overwrite(tensor, seen(tensor, step=5))

    assert torch.equal(tensor, torch.full((2, 3), 7.0))
    assert values.not_forced == {}


def test_what_a_loss_scale_is_in_is_not_forced_to_what_it_is_not_in(tmp_path: Path) -> None:
    path = run(mlp(), tmp_path / "baseline", detail="tensors")
    recording = traindiff.open_recording(path)
    seen = next(one for step in recording.steps(0) for one in step.observations if one.phase == "backward")
    values, tensor = ForcedValues(recording), torch.zeros(seen.shard.shape)

    values.overwrite(tensor, seen._replace(scaled=True))

    assert not tensor.any()
    assert values.not_forced == {f"{seen.path} {seen.slot}": "a loss scale is in it in one of the runs only"}
    values.overwrite(tensor, seen)
    assert tensor.any()


def test_a_parameter_that_something_else_changes_between_steps_is_named(tmp_path: Path) -> None:
    def edited(training: Recipe) -> Recipe:
        def recipe() -> Any:
            found = training()
            assert isinstance(found, traindiff.Training)
            step, weight = found.step, found.model.get_parameter("3.weight")
            calls = [0]

            def stepping(batch: Any) -> Any:
                calls[0] += 1
                if calls[0] == 2:
                    with torch.no_grad():
                        weight[0, 0] += 0.5
                return step(batch)

            return replace(found, step=stepping)

        return recipe

    path = run(mlp(), tmp_path / "baseline", detail="tensors")
    comparison = traindiff.compare(path, run(edited(mlp()), tmp_path / "forced", forced_by=path))

    first = comparison.first_divergence
    assert first is not None
    assert (first.step, first.phase, first.stage, first.path) == (1, "param", "edited", "3.weight")
    assert "not by the optimizer" in first.message


class Packed(nn.Module):
    """Takes sequences of different lengths, the longest first."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, :, 0] > 0.0).sum(1).clamp_min(1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize(("baseline", "candidate"), [(1, 2), (2, 1)])
def test_indices_of_other_micro_batches_are_not_forced(baseline: int, candidate: int, tmp_path: Path) -> None:
    def packed(micro_batches: int) -> Recipe:
        def recipe() -> Any:
            model = Packed()
            optimizer = SGD(model.parameters(), lr=0.1)

            def step(batch: Tensor) -> Tensor:
                optimizer.zero_grad()
                total = torch.zeros(())
                for part in batch.chunk(micro_batches):
                    loss = model(part).square().sum() / 8
                    loss.backward()
                    total += loss.detach()
                optimizer.step()
                return total

            return model, optimizer, torch.randn(4, 8, 5, 6), step

        return recipe

    path = run(packed(baseline), tmp_path / "baseline", detail="tensors")
    comparison = traindiff.compare(path, run(packed(candidate), tmp_path / "forced", forced_by=path))

    assert comparison.verdict == "equivalent", str(comparison)
    assert any("whole numbers may be places in a micro-batch" in note for note in comparison.notes)
