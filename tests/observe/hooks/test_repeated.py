"""What repeats in each step is recorded as if each tensor was recorded by itself, whatever changes in between."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, Optimizer

import traindiff
from traindiff.observe.torch.session.observations import Observations

STEPS = 7


@pytest.fixture(autouse=True)
def without_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is imported, as by other tests of this process, tensors may be those of an engine."""
    monkeypatch.delitem(sys.modules, "deepspeed", raising=False)


class Mixed(nn.Module):
    """Layers whose parameters have several shapes, layouts and dtypes, and some that are not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.first = nn.Linear(6, 8)
        self.wide = nn.Linear(8, 8).double()
        self.image = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(8)
        self.transposed = nn.Parameter(torch.randn(5, 8).t())
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.complex = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.unused = nn.Linear(3, 3)
        self.uses_all = True

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(functional.gelu(self.first(self.embedding(tokens))))
        hidden = self.wide(hidden.double()).float()
        image = self.image(hidden.reshape(-1, 2, 2, 2)).sum()
        found = (hidden @ self.transposed).square().mean() * self.scalar + image
        found = found + self.nothing.sum() + torch.view_as_real(self.complex).square().sum()
        return found + self.unused(torch.ones(3)).sum() if self.uses_all else found


Change = Callable[[int, Mixed, Optimizer], None]


def nothing(_: int, __: Mixed, ___: Optimizer) -> None:
    """The same in each step."""


def frozen_and_unfrozen(step: int, model: Mixed, _: Optimizer) -> None:
    """Parameters do not require a gradient for some steps."""
    model.first.requires_grad_(step not in (2, 3, 5))


def frozen_in_turn(step: int, model: Mixed, _: Optimizer) -> None:
    """Of two parameters of one shape, now one and now the other is trained."""
    model.first.bias.requires_grad_(step // 2 % 2 == 0)
    model.norm.bias.requires_grad_(step // 2 % 2 == 1)


def unused(step: int, model: Mixed, _: Optimizer) -> None:
    """Parameters that require a gradient get none."""
    model.uses_all = step not in (1, 4)


def other_data(step: int, model: Mixed, _: Optimizer) -> None:
    """Parameters get other memory, strides, and dtypes."""
    if step == 2:
        model.first.weight.data = torch.randn(6, 8).t()
    if step == 3:
        model.first.weight.data = torch.randn(8, 6)
    if step == 5:
        model.wide.float()
        model.wide.double()


def replaced(step: int, model: Mixed, optimizer: Optimizer) -> None:
    """A layer of the model is replaced, and the optimizer is given the parameters of the new one."""
    if step == 3:
        model.first = nn.Linear(6, 8)
        optimizer.add_param_group({"params": [*model.first.parameters()]})


def dropped(step: int, _: Mixed, optimizer: Optimizer) -> None:
    """The optimizer holds fewer parameters from a step on, and others with the same ids of groups."""
    if step == 3:
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][1:]
    if step == 5:
        optimizer.param_groups[0]["params"].reverse()


def loaded(step: int, _: Mixed, optimizer: Optimizer) -> None:
    """The optimizer's state is replaced."""
    if step == 3:
        optimizer.load_state_dict(optimizer.state_dict())
    if step == 5:
        optimizer.state.clear()


def more_state(step: int, model: Mixed, optimizer: Optimizer) -> None:
    """The state of one parameter has a further entry for some steps."""
    state = optimizer.state[model.first.weight]
    if step == 3:
        state["more"] = torch.ones(3)
    if step == 5:
        state.pop("more", None)
        state["count"] = 3


def edited(step: int, model: Mixed, _: Optimizer) -> None:
    """Something else than the optimizer changes a parameter."""
    if step in (2, 4):
        model.first.weight.data.mul_(1.5)
    if step == 5:
        model.scalar.data.add_(1.0)


def other_settings(step: int, _: Mixed, optimizer: Optimizer) -> None:
    """Settings of the optimizer change: one number, numbers in a list that stays the same, their kind, one more."""
    group = optimizer.param_groups[0]
    if step == 2:
        group["lr"] = 2e-2
        group["more"] = [1.0, 2.0]
    if step in (3, 5):
        group["more"][1] *= 3.0
    if step == 4:
        group["lr"] = torch.tensor(3e-2)
    if step == 5:
        group["lr"].mul_(0.5)


CHANGES = (
    nothing, frozen_and_unfrozen, frozen_in_turn, unused, other_data, replaced, dropped, loaded, more_state, edited,
    other_settings,
)  # fmt: skip


def recorded(path: Path, change: Change, make: Callable[[nn.Module], Optimizer], **settings: object) -> bytes:
    """The bytes of a recording of a short training, and of what it computed."""
    torch.manual_seed(0)
    model = Mixed()
    optimizer = make(model)
    with traindiff.record(path, model, optimizer, **settings):  # type: ignore[arg-type]
        for step in range(STEPS):
            change(step, model, optimizer)
            for _ in range(1 + (step == 4)):
                tokens = torch.randint(20, (4 + (step == 5),))
                model(tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 3)
    values = [value.contiguous() for value in model.state_dict().values()]
    return (path / "rank-00000" / "observations.arrows").read_bytes() + repr(values).encode()


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows that were recorded together."""
    found: list[int] = []
    repeat = Observations._repeat

    def counted(self: Observations, plan: object, tensors: list[Tensor], *addresses: object) -> None:
        found.append(len(tensors))
        repeat(self, plan, tensors, *addresses)  # type: ignore[arg-type]

    monkeypatch.setattr(Observations, "_repeat", counted)
    return found


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "AdamW": lambda model: AdamW(model.parameters(), lr=1e-2),
    "SGD": lambda model: SGD(model.parameters(), lr=1e-2),
    "momentum": lambda model: SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "groups": lambda model: Adam([{"params": [one], "lr": 1e-2} for one in model.parameters()], amsgrad=True),
}


def go_the_slow_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record each tensor by itself, as a tensor of any class and device."""
    monkeypatch.setattr(Observations, "_may_repeat", property(lambda _: False))
    monkeypatch.setattr(Observations, "_straight", lambda *_, **__: False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tensors_that_are_recorded_together_give_the_bytes_of_those_recorded_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: list[int], change: Change, optimizer: str
) -> None:
    together = recorded(tmp_path / "together", change, OPTIMIZERS[optimizer])
    assert repeats, "no plan was ever used"
    go_the_slow_way(monkeypatch)
    repeats.clear()
    one_by_one = recorded(tmp_path / "one-by-one", change, OPTIMIZERS[optimizer])
    assert not repeats
    assert together == one_by_one


@pytest.mark.parametrize("observe", [("grad",), ("optimizer",), ("param",), ("grad", "grad.stages", "optimizer")])
def test_a_part_of_the_phases_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repeats: list[int], observe: tuple[str, ...]
) -> None:
    together = recorded(tmp_path / "together", nothing, OPTIMIZERS["AdamW"], observe=observe)
    assert repeats
    go_the_slow_way(monkeypatch)
    assert together == recorded(tmp_path / "one-by-one", nothing, OPTIMIZERS["AdamW"], observe=observe)
