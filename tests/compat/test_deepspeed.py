"""ModelStepper under its name, on sides that need no DeepSpeed; tests/compat/snippets has its engines."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.on_ranks import run_on_ranks
from traindiff.compat.deepspeed import ModelStepper


class Net(nn.Module):
    """Computes its loss, as the original expects of an engine's module."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(requires_grad=False)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x.mul_(0.5)  # it owns its input: the original clones it for each engine
        return nn.functional.cross_entropy(self.head(torch.relu(self.hidden(self.frozen(x)))), y)


def side(*, lr: float = 1e-2) -> Any:
    torch.manual_seed(0)
    net = Net()
    return net, torch.optim.SGD((one for one in net.parameters() if one.requires_grad), lr=lr)


def batches(num: int = 12) -> list[list[Tensor]]:
    data = torch.Generator().manual_seed(1)
    return [[torch.randn(5, 4, generator=data), torch.randint(3, (5,), generator=data)] for _ in range(num)]


def lines(printed: str, first: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith(first)]


def test_the_arguments_have_the_originals_order_and_defaults() -> None:
    given = {name: one.default for name, one in inspect.signature(ModelStepper).parameters.items()}
    required = inspect.Parameter.empty

    assert list(given.items()) == [
        ("engine_base", required), ("engine_test", required), ("loader", required),
        ("num_batches", 10), ("test_every", 1), ("status_every", 1),
        ("track_params", True), ("track_loss", True), ("track_grads", True),
        ("param_tol", 1e-4), ("loss_tol", 1e-4), ("grad_tol", 1e-4), ("batch_data_fn", None),
    ]  # fmt: skip


def test_it_prints_the_originals_lines(capsys: pytest.CaptureFixture[str]) -> None:
    given = batches()
    before = [[one.clone() for one in batch] for batch in given]

    assert ModelStepper(side(), side(), given, status_every=5).go() is True
    assert capsys.readouterr().out.splitlines()[:11] == [
        "--- Model Stepper Configuration ---", "batches=10", "test_every=1", "status_every=5",
        "track_params=True", "param_tol=1.000000e-04", "track_loss=True", "loss_tol=1.000000e-04",
        "track_grads=True", "grad_tol=1.000000e-04", "",
    ]  # fmt: skip
    assert all(
        torch.equal(one, was)
        for batch, old in zip(given, before, strict=True)
        for one, was in zip(batch, old, strict=True)
    )


@pytest.mark.parametrize("num", [4, 7, 12])
def test_status_lines_name_the_number_of_batches_that_was_asked_for(
    num: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ModelStepper(side(), side(), batches(num), num_batches=7, status_every=3).go()

    said = [line.split()[1:4] for line in lines(capsys.readouterr().out, "STATUS")]
    assert said == [[f"batch={number}", "/", "7"] for number in ((0, 3) if num == 4 else (0, 3, 6))]


def test_a_divergence_fails_and_counts_parameters_as_the_original(capsys: pytest.CaptureFixture[str]) -> None:
    stepper = ModelStepper(side(), side(lr=0.0), batches())

    assert stepper.go() is False
    printed = capsys.readouterr().out
    (first, *_), (last, status) = lines(printed, "DIVERGED"), printed.splitlines()[-1:] + lines(printed, "STATUS")
    assert first.startswith("DIVERGED PARAMETER rank=0 batch=0 param_idx=0 name=hidden.weight abs_diff=")
    assert first.endswith(" tol=1.00000e-04")
    assert last == "TEST FAILED"
    assert printed.index(first) < printed.index(status)
    assert status.startswith("STATUS batch=0 / 10 base_loss=1.")
    assert stepper.comparison is not None
    assert stepper.comparison.verdict == "diverged"


def test_a_divergence_of_losses_shows_both() -> None:
    def other(batch: list[Tensor]) -> list[Tensor]:
        return batch

    class Louder(Net):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return 1.25 * super().forward(x, y)

    torch.manual_seed(0)
    net = Louder()
    stepper = ModelStepper(side(), (net, torch.optim.SGD(net.parameters(), lr=1e-2)), batches(), batch_data_fn=other)
    assert stepper.go() is False
    assert float(stepper.test_loss) == pytest.approx(1.25 * float(stepper.base_loss))


@pytest.mark.parametrize("what", ["params", "loss", "grads"])
def test_a_tolerance_beside_what_is_not_tracked_is_accepted(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    tolerance = {"params": "param_tol", "loss": "loss_tol", "grads": "grad_tol"}[what]
    tracked: dict[str, Any] = {f"track_{what}": False, tolerance: 1e-3}

    assert ModelStepper(side(), side(), batches(), **tracked).go()
    assert f"track_{what}=False\n{tolerance}=1.000000e-03\n" in capsys.readouterr().out
    assert traindiff.Lockstep(
        side(), side(), batches(2), loss=lambda net, one: net(*map(torch.clone, one)), **tracked
    ).go()


def test_what_is_not_tracked_does_not_fail() -> None:
    assert not ModelStepper(side(), side(lr=0.0), batches(), num_batches=1).go()
    assert ModelStepper(side(), side(lr=0.0), batches(), num_batches=1, track_params=False).go()


class Unpaired:
    """A batch of a class of its own, which only `batch_data_fn` can read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


def test_batch_data_fn_makes_the_arguments_of_both_engines() -> None:
    seen = []

    def arguments(batch: Unpaired) -> tuple[Tensor, Tensor]:
        seen.append(batch)
        return batch.x.clone(), batch.y

    given = [Unpaired(*one) for one in batches(3)]
    stepper = ModelStepper(side(), side(), given, batch_data_fn=arguments)

    assert stepper.go()
    assert seen == [one for one in given for _ in range(2)]
    assert float(stepper.base_loss) == float(stepper.test_loss) > 0.0


def nan_in(number: int) -> Any:
    """A candidate whose loss is NaN in one batch."""
    net, optimizer = side()
    counted = iter(range(99))

    def step(batch: list[Tensor]) -> Tensor:
        loss = net(batch[0].clone(), batch[1]) * (float("nan") if next(counted) == number else 1.0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return net, optimizer, step


@pytest.mark.parametrize(("num_batches", "last"), [(6, 5), (None, 11), (50, 11)])
def test_the_last_batch_is_tested_whatever_test_every_says(num_batches: int | None, last: int) -> None:
    stepper = ModelStepper(side(), nan_in(last), batches(), num_batches=num_batches, test_every=4)

    assert stepper.go() is False
    assert stepper.comparison is not None
    first = stepper.comparison.first_divergence
    assert first is not None
    assert first.step == last
    assert ModelStepper(side(), nan_in(last), batches(), num_batches=last, test_every=4).go()


def test_go_reads_the_attributes_anew() -> None:
    stepper = ModelStepper(side(), side(lr=0.0), batches())
    assert not stepper.go()
    stepper.track_params = stepper.track_loss = stepper.track_grads = False
    stepper.track_loss, stepper.loss_tol = True, 10.0
    assert stepper.go()


def test_overriding_what_is_never_called_is_refused_at_once() -> None:
    with pytest.raises(traindiff.ConfigError, match="overrides _get_params, which is never called"):

        class Gathering(ModelStepper):
            def _get_params(self) -> None: ...


def on_ranks() -> list[str]:
    """Lines of a candidate that does not learn, of one whose loss differs on rank 1, and of NaN in a part."""
    import io
    from contextlib import redirect_stdout

    def distributed_side(**settings: Any) -> Any:
        net, optimizer = side(**settings)
        return DistributedDataParallel(net), optimizer

    def louder_on_rank_1() -> Any:
        net, optimizer = distributed_side()

        def step(batch: list[Tensor]) -> Tensor:
            loss = net(batch[0].clone(), batch[1]) * (1.5 if distributed.get_rank() == 1 else 1.0)
            loss.backward()
            return loss

        return net, optimizer, lambda batch: [step(batch), optimizer.step(), optimizer.zero_grad()][0]

    said = io.StringIO()
    with redirect_stdout(said):
        passed = ModelStepper(distributed_side(), distributed_side(lr=0.0), batches()).go()
        others = ModelStepper(distributed_side(), louder_on_rank_1(), batches(), track_grads=False).go()
    assert (passed, others) == (False, False)
    return said.getvalue().splitlines()


def test_a_divergence_is_printed_for_each_rank_that_sees_it() -> None:
    printed, other = run_on_ranks(on_ranks, 3)[:2]

    ended = printed.index("TEST FAILED")
    shown = [line.split()[1:5] for line in printed[:ended] if line.startswith("DIVERGED")]
    assert shown[:3] == [["PARAMETER", f"rank={rank}", "batch=0", "param_idx=0"] for rank in range(3)]
    losses = [line for line in printed[ended:] if line.startswith("DIVERGED LOSS")]
    assert [line.split()[2:4] for line in losses] == [["rank=1", "batch=0:"]]
    base, test, apart, share = (float(field.partition("=")[2]) for field in losses[0].split()[4:8])
    assert test == pytest.approx(1.5 * base, rel=1e-4)
    assert (apart, share) == pytest.approx((0.5 * base, 0.5), rel=1e-4)
    assert other == []
