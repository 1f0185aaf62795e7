"""Trainings in which a dispatch mode would be in the way: they compute the same, and no mode is left on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import traindiff
from tests.observe.hooks.models import WIDTH
from tests.observe.hooks.reading import rows, unobserved
from traindiff.core.observation import OPERATOR

Body = Callable[[Tensor], Tensor]


class Computes(nn.Module):
    """A module whose forward pass is a function."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def train(path: Path, body: Body, *, after: Body = Tensor.square, **settings: Any) -> list[Tensor]:
    """Parameters after two steps of a training in whose middle is `body`."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Computes(body), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with traindiff.record(path, net, optimizer, **settings):
        for step in range(2):
            after(net(torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(step)))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [one.detach() for one in net.parameters()]


def product(x: Tensor) -> Tensor:
    return x * x.prod(-1, keepdim=True).sigmoid()


def filled(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0, x.mean())


def paths(directory: Path) -> set[str]:
    return {seen.path for seen, _ in rows(directory) if seen.stage == OPERATOR}


@pytest.mark.parametrize("body", [product, filled])
def test_a_backward_pass_that_would_round_otherwise_is_left_alone_and_said_to_be_unknown(
    body: Body, tmp_path: Path
) -> None:
    plain = train(tmp_path / "plain", body)
    looked_into = train(tmp_path / "run", body, operators="1", strict=True)

    for one, other in zip(plain, looked_into, strict=True):
        assert torch.equal(one, other)
    node = "1/ProdBackward1[0]" if body is product else "1/MaskedFillBackward1[0]"
    assert (node, "output[0]") in [one[:2] for one in unobserved(tmp_path / "run")]
    assert f"1/aten.{'mul' if body is product else 'masked_fill'}[0]" in paths(tmp_path / "run")


def test_so_is_one_outside_of_the_modules_that_were_chosen(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", torch.tanh, after=product)
    looked_into = train(tmp_path / "run", torch.tanh, after=product, operators="1", strict=True)

    for one, other in zip(plain, looked_into, strict=True):
        assert torch.equal(one, other)
    assert "1/aten.tanh_backward[0]" in paths(tmp_path / "run")


def either(x: Tensor) -> Tensor:
    found: Tensor = torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))
    return found


doubled = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("body", [either, doubled])
def test_what_torch_compiles_inside_a_module_runs_as_it_does_otherwise(body: Body, tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", body)
    with pytest.warns(traindiff.TraindiffWarning, match="compiled code runs no operators one by one"):
        looked_into = train(tmp_path / "run", body, operators="1")

    for one, other in zip(plain, looked_into, strict=True):
        assert torch.equal(one, other)


def test_an_interrupt_leaves_no_mode_on_once_the_training_goes_on(tmp_path: Path) -> None:
    interrupts = [True]

    def interrupted(x: Tensor) -> Tensor:
        if interrupts.pop():
            raise KeyboardInterrupt
        return x * 2

    batch = torch.ones(2, WIDTH)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Computes(interrupted))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", net, optimizer, operators="1", strict=True):
        with pytest.raises(KeyboardInterrupt):
            net(batch)
        interrupts.append(False)
        loss = net(batch).sum()
        assert not _get_current_dispatch_mode_stack()
        loss.backward()
        assert not _get_current_dispatch_mode_stack()
        optimizer.step()

    assert paths(tmp_path / "run") == {"1/aten.mul[0]"}


def test_modules_that_other_threads_call_beside_a_chosen_one_leave_it_as_it_is(tmp_path: Path) -> None:
    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            made: dict[int, Tensor] = {}

            def run(number: int) -> None:
                made[number] = self.parts[number](x)

            threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert len(_get_current_dispatch_mode_stack()) == 1
            return made[0] + made[1]

    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Parallel())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", net, optimizer, operators="1", strict=True):
        for _ in range(2):
            net(torch.ones(2, WIDTH)).sum().backward()
            assert not _get_current_dispatch_mode_stack()
            optimizer.step()

    assert {path for path in paths(tmp_path / "run") if not path.startswith("1.parts")} == {"1/aten.add[0]"}


def test_a_recording_that_is_closed_in_the_middle_of_a_pass_leaves_no_mode_on(tmp_path: Path) -> None:
    recordings: list[traindiff.Recorder] = []

    def closes(x: Tensor) -> Tensor:
        recordings[-1].close()
        return x * 2

    def closed_by_its_gradient(x: Tensor) -> Tensor:
        x = x * 2
        x.register_hook(lambda _: recordings[-1].close())
        return x

    for number, body in enumerate((closes, closed_by_its_gradient)):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Computes(body))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        recordings.append(traindiff.record(tmp_path / f"run-{number}", net, optimizer, operators="1", strict=True))
        net(torch.ones(2, WIDTH)).sum().backward()
        assert not _get_current_dispatch_mode_stack()


@pytest.fixture(autouse=True)
def no_mode_is_left() -> Iterator[None]:
    yield
    assert not _get_current_dispatch_mode_stack()
