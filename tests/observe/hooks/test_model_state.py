"""Parameters as a step finds them, and buffers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import row, rows
from tests.observe.hooks.trainings import TRAININGS, batches
from traindiff.core.kernels import summarize
from traindiff.core.shards import Shard


def record(path: Path, count: int, **options: Any) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True, **options):
        for batch in batches(count):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()


def before(path: Path) -> list[int]:
    return [seen.step for seen, _ in rows(path, phase="param", stage="before", path="0.weight")]


def test_parameters_are_recorded_before_the_first_step_only(tmp_path: Path) -> None:
    record(tmp_path / "run", 4)

    assert before(tmp_path / "run") == [0]
    torch.manual_seed(0)
    expected = summarize(mlp()[0].weight, Shard.whole((16, 8)))
    assert row(tmp_path / "run", phase="param", stage="before", path="0.weight")[1] == expected


def test_parameters_are_recorded_again_before_each_step_whose_predecessor_was_not(tmp_path: Path) -> None:
    record(tmp_path / "every", 7, every=3)
    record(tmp_path / "steps", 8, steps="1-2,5-6")

    assert before(tmp_path / "every") == [0, 3, 6]
    assert before(tmp_path / "steps") == [1, 5]


def test_every_recorded_step_has_both_ends_of_its_update(tmp_path: Path) -> None:
    record(tmp_path / "all", 6)
    record(tmp_path / "some", 6, steps=[2, 4], observe="update")

    after = {seen.step: summary for seen, summary in rows(tmp_path / "all", phase="param", stage="", path="2.weight")}
    for step in (2, 4):
        begin = row(tmp_path / "some", phase="param", stage="before", path="2.weight", step=step)[1]
        end = row(tmp_path / "some", phase="param", stage="", path="2.weight", step=step)[1]
        assert (begin, end) == (after[step - 1], after[step])


def test_frozen_parameters_are_recorded_before_the_first_step(tmp_path: Path) -> None:
    TRAININGS["frozen_and_unused_parameters"](lambda *args: traindiff.record(tmp_path / "run", *args, strict=True))

    assert before(tmp_path / "run") == [0]


def buffers(path: Path, name: str) -> list[tuple[int, str]]:
    return [(seen.step, seen.stage) for seen, _ in rows(path, slot="buffer", path=name)]


class Counting(nn.Module):
    """Writes each of its buffers in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("constant", torch.arange(3))
        self.register_buffer("in_place", torch.tensor(0))
        self.register_buffer("replaced", torch.tensor(0))
        self.register_buffer("through_data", torch.tensor(0.0))
        self.register_buffer("dropped", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.replaced = self.replaced + 1
        self.through_data.data.add_(1)
        self.dropped = None
        return x


def test_buffers_are_recorded_before_the_first_step_and_when_they_may_have_been_written(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), Counting())
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for batch in batches(3):
            model(batch).sum().backward()
            optimizer.step()

    written = [(0, "before"), (0, ""), (1, ""), (2, "")]
    assert buffers(tmp_path / "run", "2.constant") == [(0, "before")]
    assert buffers(tmp_path / "run", "2.dropped") == [(0, "before")]
    for name in ("1.num_batches_tracked", "2.in_place", "2.replaced", "2.through_data"):
        assert buffers(tmp_path / "run", name) == written
        counted = rows(tmp_path / "run", path=name)
        assert [int(summary["maximum"]) for _, summary in counted] == [0, 1, 2, 3]
    # Batch normalization writes these without moving their version counters.
    for name in ("1.running_mean", "1.running_var"):
        assert buffers(tmp_path / "run", name) == written
        assert len({int(summary["fingerprint"]) for _, summary in rows(tmp_path / "run", path=name)}) == 4


def test_without_parameters_no_state_of_the_model_is_recorded(tmp_path: Path) -> None:
    record(tmp_path / "run", 2, observe=["grad", "forward"])

    assert {seen.phase for seen, _ in rows(tmp_path / "run")} == {"grad", "forward"}


def test_only_selected_parameters_and_buffers_are_recorded(tmp_path: Path) -> None:
    record(tmp_path / "run", 1, select="*.bias")

    assert {seen.path for seen, _ in rows(tmp_path / "run", phase="param")} == {"0.bias", "2.bias"}


def test_a_call_inside_a_transform_of_torch_func_disturbs_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(model, parameters, (sample[None],))
        return found.square().mean()

    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for batch in batches(3):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            parameters = {name: one.detach() for name, one in model.named_parameters()}
            of_samples = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch)
            assert of_samples["0.weight"].shape == (len(batch), 16, 8)

    assert before(tmp_path / "run") == [0]
    assert traindiff.check(tmp_path / "run").verdict == "healthy"
