"""Ranks that hold other copies on purpose: parameters that an engine ignores, and local SGD."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.on_ranks import run_on_ranks

STEPS = 9
EVERYTHING = {f"{layer}.{one}" for layer in ("first", "expert", "last") for one in ("weight", "bias")}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.expert(torch.tanh(self.first(x)))))
        return result


def plain(model: Net) -> nn.Module:
    return model


def ignoring(model: Net) -> nn.Module:
    names = ["expert.weight", "expert.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
    nn.init.normal_(model.expert.weight, generator=torch.Generator().manual_seed(distributed.get_rank()))
    return DistributedDataParallel(model)


def each_its_own(_: Any, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook that does not communicate, as that of post-local SGD."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def hooked(model: Net) -> nn.Module:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, each_its_own)
    return wrapped


def never(step: int, model: nn.Module) -> None:
    pass


def every(count: int, *, until: int = STEPS, but: str = "nothing") -> Callable[[int, nn.Module], None]:
    def average(step: int, model: nn.Module) -> None:
        if (step + 1) % count == 0 and step < until:
            for name, parameter in model.named_parameters():
                if but not in name:
                    distributed.all_reduce(parameter.data)
                    parameter.data.div_(distributed.get_world_size())

    return average


def reduced_at_first(step: int, model: nn.Module) -> None:
    """Nothing: gradients are reduced before, see `train`; parameters are averaged in each third step."""
    every(3)(step, model)


AVERAGES = {
    "gradients at first": reduced_at_first,
    "never": never, "in every step": every(1), "in every third step": every(3), "but one": every(2, but="last.weight"),
    "in the first steps only": every(2, until=4),
}  # fmt: skip


def train(path: str, wrap: Callable[[Net], nn.Module], averages: str) -> None:
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(distributed.get_rank())
    with traindiff.record(path, model, optimizer, observe=("loss", "grad", "param", "update", "optimizer", "witness")):
        for step in range(STEPS):
            inputs = torch.randn(8, 8, generator=data)
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :2]).square().mean().backward()
            for parameter in model.parameters() if averages == "gradients at first" and step < 2 else ():
                assert parameter.grad is not None
                distributed.all_reduce(parameter.grad)
                parameter.grad /= distributed.get_world_size()
            optimizer.step()
            AVERAGES[averages](step, model)


def checked(path: Path, wrap: Callable[[Net], nn.Module], averages: str) -> Any:
    run_on_ranks(train, 2, str(path), wrap, averages)
    return traindiff.check(path, rules="ranks-disagree,wrong-gradient")


@pytest.mark.parametrize("wrap", [plain, hooked])
@pytest.mark.parametrize(("averages", "said"), [
    ("in every step", "8 times, first before step 1"), ("in every third step", "2 times, first before step 3"),
])  # fmt: skip
def test_parameters_that_the_training_averages_are_a_note(
    tmp_path: Path, wrap: Callable[[Net], nn.Module], averages: str, said: str
) -> None:
    verdict = checked(tmp_path / "run", wrap, averages)

    assert verdict.verdict == "healthy", str(verdict)
    assert any(f"makes 6 parameters equal on all ranks again, {said}" in note for note in verdict.notes)


@pytest.mark.parametrize(("averages", "paths", "step"), [
    ("never", EVERYTHING, 0),
    ("but one", {"last.weight"}, 0),
    ("gradients at first", EVERYTHING, 2), ("in the first steps only", EVERYTHING, 4),
])  # fmt: skip
def test_parameters_that_stay_apart_are_findings(tmp_path: Path, averages: str, paths: set[str], step: int) -> None:
    verdict = checked(tmp_path / "run", plain, averages)

    found = [one for one in verdict.findings if one.kind == "ranks-disagree"]
    assert {one.path for one in found} == paths
    assert min(one.step for one in found) == step


def test_parameters_that_the_engine_ignores_are_a_note(tmp_path: Path) -> None:
    verdict = checked(tmp_path / "run", ignoring, "never")

    assert verdict.verdict == "healthy", str(verdict)
    assert any(
        note.startswith(
            "Not compared between ranks, because DistributedDataParallel ignores them: expert.bias, expert."
        )
        for note in verdict.notes
    )


def by_torch(path: str) -> None:
    """torch's own optimizer for it, which has none of the hooks of its class."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer  # importing it warns

    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer: Any = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), PeriodicModelAverager(period=2, warmup_steps=0)
    )
    data = torch.Generator().manual_seed(distributed.get_rank())
    with traindiff.record(path, model, optimizer, strict=True):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 8, generator=data)).square().mean().backward()
            optimizer.step()


def test_the_optimizer_of_torch_that_averages_is_recorded(tmp_path: Path) -> None:
    run_on_ranks(by_torch, 2, str(tmp_path / "run"))

    verdict = traindiff.check(tmp_path / "run")
    assert (verdict.verdict, verdict.to_json()["steps"][-1]) == ("healthy", 2)
