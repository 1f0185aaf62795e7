"""`traindiff.inspect`: an intermediate tensor, forward and backward."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import traindiff
from tests.observe.hooks.models import mlp
from tests.observe.hooks.reading import row, rows
from tests.observe.hooks.trainings import batches
from traindiff.core.kernels import summarize
from traindiff.core.shards import OPEN, Shard
from traindiff.observe.torch.hooks import inspect


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = traindiff.inspect("attention.scores", self.query(x) @ self.key(x).T)
        return scores.softmax(-1) @ x


def record(path: Path, model: nn.Module, parts: list[Tensor], **options: object) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True, **options):
        for part in parts:
            model(part).square().mean().backward()
        optimizer.step()


def test_inspecting_gives_back_the_tensor_itself(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    assert traindiff.inspect("name", tensor) is tensor
    with traindiff.record(tmp_path / "run", mlp(), strict=True):
        assert traindiff.inspect("name", tensor) is tensor


def test_without_a_recording_inspecting_does_nothing() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2

    traindiff.inspect("name", tensor)

    assert inspect._observers == []
    assert tensor._backward_hooks is None


def test_a_tensor_inside_nested_modules_is_seen_forward_and_backward(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(Attention()))
    batch = next(batches())
    hidden = model[0](batch)
    scores = model[1][0].query(hidden) @ model[1][0].key(hidden).T
    record(tmp_path / "run", model, [batch])

    forward, summary = row(tmp_path / "run", phase="forward", path="attention.scores")
    backward, _ = row(tmp_path / "run", phase="backward", path="attention.scores")

    assert summary["fingerprint"] == summarize(scores, Shard.whole((6, 6)))["fingerprint"]
    assert (forward.slot, backward.slot) == ("value", "value")
    assert (forward.call, backward.call) == (0, 0)
    inside = [seen.path for seen, _ in rows(tmp_path / "run", phase="forward")]
    assert inside == ["0", "1.0.query", "1.0.key", "attention.scores", "1.0", "1", ""]


def test_a_name_that_is_used_again_is_numbered(tmp_path: Path) -> None:
    attention = Attention()
    record(tmp_path / "run", nn.Sequential(attention, Attention(), attention), [next(batches())])

    for phase, calls in (("forward", [0, 1, 2]), ("backward", [2, 1, 0])):
        found = rows(tmp_path / "run", phase=phase, path="attention.scores")
        assert [seen.call for seen, _ in found] == calls


def test_a_tensor_inspected_in_the_loss_is_a_part_of_the_batch(tmp_path: Path) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        for part in next(batches()).split([4, 2]):
            traindiff.inspect("errors", model(part) - 1).square().mean().backward()
        optimizer.step()
        traindiff.inspect("after", torch.ones(4, 3))

    for phase in ("forward", "backward"):
        shards = [seen.shard for seen, _ in rows(tmp_path / "run", phase=phase, path="errors")]
        assert [(shard.global_shape, shard.offset) for shard in shards] == [((OPEN, 4), (0, 0)), ((OPEN, 4), (4, 0))]
    assert not row(tmp_path / "run", path="after")[0].shard.batched


def test_a_tensor_without_gradient_is_seen_forward_only(tmp_path: Path) -> None:
    with traindiff.record(tmp_path / "run", mlp(), strict=True):
        traindiff.inspect("mask", torch.ones(3, dtype=torch.bool))

    assert row(tmp_path / "run", path="mask")[0].dtype == "bool"


def test_nothing_is_inspected_at_steps_that_are_not_recorded_or_without_activations(tmp_path: Path) -> None:
    record(tmp_path / "steps", Attention(), [next(batches())], steps="1-")
    record(tmp_path / "observe", Attention(), [next(batches())], observe="grad")

    assert rows(tmp_path / "steps") == []
    assert {seen.phase for seen, _ in rows(tmp_path / "observe")} == {"grad"}


def test_of_what_is_no_tensor_the_recording_says_so_and_others_are_inspected(tmp_path: Path) -> None:
    model = Attention()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        assert traindiff.inspect("no tensor", "text") == "text"
        model(next(batches())).sum().backward()
        optimizer.step()

    ((seen, _),) = rows(tmp_path / "run", path="no tensor")
    assert seen.unobserved == "it is a str, and inspect observes tensors"
    assert [one.phase for one, _ in rows(tmp_path / "run", path="attention.scores")] == ["forward", "backward"]


@pytest.mark.parametrize(("name", "path"), [(3, "3"), ("\ud800", "\\ud800"), ("a\0\r\n\u2028", r"a\x00\r\n\u2028")])
def test_any_name_can_be_recorded(name: str, path: str, tmp_path: Path) -> None:
    model = Attention()
    optimizer = SGD(model.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", model, optimizer, strict=True):
        traindiff.inspect(name, torch.ones(3))
        model(next(batches())).sum().backward()
        optimizer.step()

    assert len(rows(tmp_path / "run", path=path)) == 1
