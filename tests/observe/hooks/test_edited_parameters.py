"""A parameter that something else than its optimizer changes between two steps is recorded, and named."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.observe.hooks.reading import rows
from traindiff.observe.torch.hooks.marks import mark_of

Edit = Callable[[nn.Module], Any]


def nothing(_: nn.Module) -> None:
    pass


def in_memory(model: nn.Module) -> None:
    """As another process, or a broken kernel, writes: no version counter moves."""
    weight = model.get_parameter("2.weight").detach().numpy()
    weight.flat[5] += 0.25


def clamped(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.clamp_(-0.01, 0.01)


def train(path: Path, edit: Edit = nothing, *, at: tuple[int, ...] = (2,), **settings: Any) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 40), nn.GELU(), nn.Linear(40, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer, **settings):
        for step in range(6):
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in at:
                edit(model)
    return path


def edited(path: Path) -> list[tuple[int, str]]:
    return [(seen.step, seen.path) for seen, _ in rows(path, phase="param") if seen.stage == "edited"]


def test_a_write_between_two_steps_is_the_first_divergence(tmp_path: Path) -> None:
    right, wrong = train(tmp_path / "right"), train(tmp_path / "wrong", in_memory)
    assert (edited(right), edited(wrong)) == ([], [(3, "2.weight")])
    first = traindiff.compare(right, wrong).first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path, first.kind) == (3, "param", "2.weight", "edited")
    assert first.message == "In the candidate, 2.weight changed between step 2 and step 3, not by the optimizer's step."
    verdict = traindiff.check(wrong)
    assert verdict.verdict == "healthy"
    (warning,) = verdict.warnings
    assert warning.message == "2.weight changed between step 2 and step 3, not by the optimizer's step."


class ScheduleFree(torch.optim.Optimizer):
    """Trains y = (1 - b) z + b x and evaluates x, an average. Source: Defazio et al., The Road Less Scheduled, 2024."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5, "beta": 0.9})
        self._steps = 0

    @torch.no_grad()
    def move(self, *, evaluate: bool) -> None:
        """From y to x, or back."""
        for group in self.param_groups:
            weight = 1.0 - (1.0 / group["beta"] if evaluate else group["beta"])
            for one in group["params"]:
                one.lerp_(self.state[one]["z"], weight)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._steps += 1
        share = 1.0 / self._steps
        for group in self.param_groups:
            for one in group["params"]:
                z = self.state[one].setdefault("z", one.detach().clone())
                one.lerp_(z, share).add_(one.grad, alpha=group["lr"] * (group["beta"] * (1.0 - share) - 1.0))
                z.sub_(one.grad, alpha=group["lr"])


def schedule_free(path: Path, *, evaluated: Collection[int] = (), wrong: int | None = None) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.Linear(40, 2))
    optimizer = ScheduleFree(model.parameters())
    with traindiff.record(path, model, optimizer):
        for step in range(8):
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step in evaluated:
                optimizer.move(evaluate=True)
                with torch.no_grad():
                    model(torch.ones(4, 6))
                if step != wrong:
                    optimizer.move(evaluate=False)
    return path


def test_weights_that_are_moved_for_an_evaluation_and_back_are_no_edit(tmp_path: Path) -> None:
    never = schedule_free(tmp_path / "never")
    often = schedule_free(tmp_path / "often", evaluated=range(8))
    assert edited(often)  # they are not back to the bit
    assert traindiff.check(often, rules="edited").warnings == ()
    assert traindiff.compare(never, often).verdict == "equivalent"


def test_weights_that_are_not_moved_back_are_found(tmp_path: Path) -> None:
    right = schedule_free(tmp_path / "right", evaluated=range(8))
    wrong = schedule_free(tmp_path / "wrong", evaluated=range(8), wrong=3)
    first = traindiff.compare(right, wrong).first_divergence
    assert first is not None
    assert (first.step, first.phase, first.kind) == (4, "param", "edited")


def test_edits_of_both_runs_do_not_tell_them_apart(tmp_path: Path) -> None:
    runs = [train(tmp_path / name, clamped, at=(0, 1, 2, 3)) for name in ("a", "b")]
    found = traindiff.compare(*runs)
    assert found.verdict == "identical"
    assert [note for note in found.notes if "not by the optimizer" in note] == [
        "In both runs: 0.weight, 0.bias, 2.weight and 3 more parameters changed between step 0 and step 1, not by the "
        "optimizer's step."
    ]


def test_steps_that_are_not_recorded_hide_no_edit_and_make_none(tmp_path: Path) -> None:
    assert edited(train(tmp_path / "every", in_memory, at=(2,), every=2)) == []
    assert edited(train(tmp_path / "later", in_memory, at=(4,), steps="0,4,5")) == [(5, "2.weight")]


def test_several_optimizers_and_closures_are_no_edits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts.values()]
    with traindiff.record(tmp_path / "two", {"a": parts["a"], "b": parts["b"]}, optimizers):
        for step in range(4):
            for part, optimizer in zip(parts.values(), optimizers, strict=True):
                part(torch.ones(2, 4)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if step % 2:
                    part(torch.ones(2, 4)).square().sum().backward()
                    optimizer.step()
    assert edited(tmp_path / "two") == []
    model = nn.Linear(4, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return float(loss.detach())

    with traindiff.record(tmp_path / "closure", model, optimizer):
        for _ in range(3):
            optimizer.step(closure)
    assert edited(tmp_path / "closure") == []


def adversaries(path: Path, edit: Edit = nothing) -> Path:
    """A loop in which the recorded step of one optimizer ends before another optimizer steps."""
    torch.manual_seed(0)
    models = nn.ModuleDict({"critic": nn.Linear(4, 1), "maker": nn.Linear(3, 4)})
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=1e-2) for name, model in models.items()}
    with traindiff.record(path, models, optimizers):
        for step in range(6):
            made = models["maker"](torch.randn(8, 3, generator=torch.Generator().manual_seed(step)))
            for name, score in (("critic", models["critic"](made.detach())), ("maker", None)):
                optimizers[name].zero_grad()
                (models["critic"](made) if score is None else score).square().mean().backward()
                optimizers[name].step()
            if step == 2:
                edit(models)
    return path


@pytest.mark.parametrize("edited_path", ["critic.weight", "maker.bias"])
def test_an_edit_after_the_step_of_another_optimizer_is_no_evaluation(tmp_path: Path, edited_path: str) -> None:
    def edit(models: nn.Module) -> None:
        with torch.no_grad():
            models.get_parameter(edited_path).view(-1)[1] += 0.5

    right, wrong = adversaries(tmp_path / "right"), adversaries(tmp_path / "wrong", edit)
    assert (edited(right), edited(wrong)) == ([], [(3, edited_path)])
    first = traindiff.compare(right, wrong).first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path, first.kind) == (3, "param", edited_path, "edited")
    assert {seen.evaluation for seen, _ in rows(wrong, phase="loss")} == {0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (33, 31), (63, 257), (129, 4, 65)])
def test_a_mark_shows_every_changed_element(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    before = mark_of(tensor)
    assert before == mark_of(tensor.clone())
    flat = tensor.view(-1)
    for place in {0, 1, len(flat) // 2, len(flat) - 1} if len(flat) else ():
        if place < len(flat):
            flat[place] = 2
            assert mark_of(tensor) != before
            flat[place] = 1
    assert mark_of(tensor) == before


def test_tensors_that_cannot_be_read_here_have_no_mark() -> None:
    assert mark_of(torch.ones(3, device="meta")) is None
    assert mark_of(torch.ones(3).to_sparse()) is None
    wide: Tensor = torch.arange(20_000.0).view(100, 200)
    assert mark_of(wide.T) == mark_of(wide.T.contiguous())
