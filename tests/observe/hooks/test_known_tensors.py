"""Activations that come in each step are recorded as if each was looked at anew, whatever changes in between."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.hooks.test_repeated import go_the_slow_way
from tests.observe.hooks.trainings import TRAININGS
from traindiff.observe.torch.session.observations import Observations

STEPS = 10


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is imported, as by other tests of this process, tensors may be those of an engine."""
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Phases and paths of the tensors that were recorded from what was known of them."""
    found: list[tuple[str, str]] = []
    again = Observations.again

    def noted(self: Observations, known: Any, tensor: Tensor, **about: Any) -> bool:
        done = again(self, known, tensor, **about)
        if done:
            found.append((known.row.phase, known.row.path))
        return done

    monkeypatch.setattr(Observations, "again", noted)
    return found


class Layout(nn.Module):
    """Returns what it is given, now and then in another layout, dtype or shape."""

    def __init__(self) -> None:
        super().__init__()
        self.how = "as it is"

    def forward(self, given: Tensor) -> Tensor:
        if self.how == "strided":
            return given.t().contiguous().t()
        if self.how == "negated":
            return torch.view_as_complex(torch.stack([given, -given], -1)).conj().imag
        return given[:, :0] if self.how == "empty" else given * 1.0


class Several(nn.Module):
    """Returns several tensors, of which not all need gradients, and things that are no tensors."""

    def forward(self, given: Tensor) -> dict[str, Any]:
        return {"value": given * 2, "index": given.argmax(1), "mean": given.mean(), "complex": given + 0j, "name": "x"}


class Changing(nn.Module):
    """Layers that are called in other ways from step to step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.twice = nn.Linear(8, 8)
        self.layout = Layout()
        self.several = Several()
        self.recurrent = nn.LSTM(8, 8)
        self.checkpointed = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 1)
        self.step = 0

    def forward(self, given: Tensor) -> Tensor:
        step = self.step
        hidden = self.first(given)
        for _ in range(2 if step in (3, 4, 8) else 1):
            hidden = self.twice(hidden)
        hidden = hidden + self.layout(hidden).sum()
        found = self.several(hidden)
        hidden = found["value"] + found["mean"] + found["complex"].real
        hidden = hidden + self.recurrent(hidden[None])[0][0]
        with torch.autocast("cpu", dtype=torch.bfloat16) if step in (5, 6, 7) else nullcontext():
            hidden = checkpoint(self.checkpointed, hidden, use_reentrant=False) if step > 5 else (
                self.checkpointed(hidden)
            )  # fmt: skip
        result: Tensor = self.last(hidden.float()).square().mean()
        return result


def recorded(path: Path, **settings: Any) -> bytes:
    """The bytes of a recording of a training that changes from step to step, and of what it computed."""
    torch.manual_seed(0)
    model = Changing()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer, **settings):
        for step in range(STEPS):
            model.step = step
            model.layout.how = {4: "strided", 5: "negated", 7: "empty"}.get(step, "as it is")
            model.first.requires_grad_(step not in (6, 7))
            if step == 8:
                model.several = Several()
            for size in {2: [4, 4], 3: [4, 2], 9: [2, 4]}.get(step, [6 if step == 4 else 4]):
                loss = model(torch.randn(size, 5))
                loss.backward(retain_graph=step == 6)
                if step == 6:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(4, 5))
                model.twice(torch.ones(4, 8))
    values = [value.contiguous() for value in model.state_dict().values()]
    return (path / "rank-00000" / "observations.arrows").read_bytes() + repr(values).encode()


SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "every second step": {"every": 2},
    "steps of a range": {"steps": "3-8"},
    "evaluation": {"evaluation": True},
    "outputs": {"observe": ("forward",)},
    "activations": {"observe": ("forward", "backward")},
    "another axis": {"batch_axis": {"layout": 1, "several output.value": None}},
    "samples in turn": {"sample_order": "interleaved"},
    "a part of the model": {"select": ["twice", "checkpointed*", "recurrent"]},
    "hooks inside": {"observe": ("forward", "backward", "operators"), "operators": ["checkpointed*"]},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_known_activations_give_the_bytes_of_those_that_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[tuple[str, str]], settings: dict[str, Any]
) -> None:
    known = recorded(tmp_path / "known", **settings)
    assert quick, "nothing was ever known"
    go_the_slow_way(monkeypatch)
    quick.clear()
    looked_at = recorded(tmp_path / "looked-at", **settings)
    assert not quick
    assert known == looked_at


@pytest.mark.parametrize("settings", [{"observe": ("backward",)}, {"detail": "signs"}, {"bounds": [0.0, 1.0]}], ids=str)
@pytest.mark.filterwarnings("ignore")
def test_settings_for_which_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: list[tuple[str, str]], settings: dict[str, Any]
) -> None:
    known = recorded(tmp_path / "known", **settings)
    assert not quick
    go_the_slow_way(monkeypatch)
    assert known == recorded(tmp_path / "looked-at", **settings)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRAININGS)
def test_trainings_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def data(directory: str) -> list[bytes]:
        path = tmp_path / directory
        TRAININGS[name](lambda *args: traindiff.record(path, *args, strict=True))
        return [one.read_bytes() for one in sorted(path.glob("rank-*/*.arrows"))]

    known = data("known")
    assert known
    go_the_slow_way(monkeypatch)
    assert known == data("looked-at")


@pytest.mark.filterwarnings("ignore")
def test_most_activations_of_an_ordinary_training_are_known(tmp_path: Path, quick: list[tuple[str, str]]) -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for _ in range(4):
            for _ in range(2):
                model(torch.randn(4, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    paths = ["", "0", "1", "2"]
    two_steps_of_two = sorted([*paths * 4])
    assert sorted(path for phase, path in quick if phase == "forward") == two_steps_of_two
    assert sorted(path for phase, path in quick if phase == "backward") == two_steps_of_two


@pytest.mark.filterwarnings("ignore")
def test_shapes_that_differ_in_each_step_are_not_found_out_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from traindiff.observe.torch.session import observations

    found_out: list[object] = []
    original = observations.known_tensor

    def noted(*args: Any) -> Any:
        found_out.append(args)
        return original(*args)

    monkeypatch.setattr(observations, "known_tensor", noted)
    layout = Layout()
    model = nn.Sequential(nn.Linear(5, 8), layout)
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, observe=("forward", "backward"), strict=True):
        for step in range(12):
            layout.how = "strided" if step % 2 else "as it is"
            model(torch.randn(4 if step < 9 else step, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert 0 < len(found_out) <= 3 * 2 * 3, "an output that looks otherwise each time is found out three times at most"


class Odd(nn.Module):
    """Returns a tensor that is ordinary until it is told to return another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "dense"

    def forward(self) -> Tensor:
        found = torch.arange(20.0).reshape(4, 5)
        if self.kind == "nested":
            return torch.nested.nested_tensor([found])
        if self.kind == "zero":
            return torch._efficientzerotensor(4, 5)  # type: ignore[attr-defined]
        if self.kind == "freed part":
            found = torch.arange(25.0).reshape(5, 5)[1:]
        if self.kind.startswith("freed"):
            found.untyped_storage().resize_(0)
        return found


ODD = {
    "nested": "a nested tensor has no dense elements",
    "zero": "it has no memory: that was freed, or is not there yet",
    "freed": "it has no memory: that was freed, or is not there yet",
    "freed part": "it has no memory: that was freed, or is not there yet",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("way", ["quick", "slow"])
def test_outputs_that_cannot_be_read_any_more_are_told_and_the_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    if way == "slow":
        go_the_slow_way(monkeypatch)
    model = nn.Sequential(nn.Linear(5, 5), Odd())
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(6):
            model[0](torch.ones(4, 5)).sum().backward()
            model[1].kind = kind if step == 4 else "dense"  # type: ignore[assignment]
            model[1]()
            optimizer.step()
            optimizer.zero_grad()
    found = [seen.unobserved for seen, _ in rows(tmp_path / "run", phase="forward", path="1", slot="output[0]")]
    assert found == ["", "", "", "", ODD[kind], ""]


@pytest.mark.filterwarnings("ignore")
def test_states_whose_memory_was_freed_are_told_and_the_training_goes_on(tmp_path: Path) -> None:
    model = nn.Linear(5, 5)
    optimizer = AdamW(model.parameters())
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for step in range(6):
            model(torch.ones(4, 5)).sum().backward()
            optimizer.step()
            optimizer.state[model.bias]["more"] = kept = torch.ones(3)
            if step == 4:
                kept.untyped_storage().resize_(0)
            optimizer.zero_grad()
    found = [seen.unobserved for seen, _ in rows(tmp_path / "run", phase="optimizer", path="bias", slot="more")]
    assert found == [
        "",
        "",
        "",
        "",
        "it has no memory: that was freed, or is not there yet",
    ]  # as the next step left it
