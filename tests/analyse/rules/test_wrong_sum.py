"""One element of a gradient that is not the sum of its contributions stands out in their sketches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import traindiff
from tests.observe.sharding.test_data_parallel import fully_sharded
from tests.observe.sharding.training import Model, train
from tests.on_ranks import run_on_ranks
from traindiff.analyse.findings import Finding

OBSERVE = ("loss", "grad", "grad.micro", "param", "update", "witness")
SITE = "blocks.1.up.weight"


def in_ddp(model: Model) -> nn.Module:
    return DistributedDataParallel(model)


def in_memory(gradient: Tensor, bit: int) -> None:
    """Flip a bit of an element, as hardware does it."""
    whole: Any = gradient.detach().view(torch.int32 if gradient.element_size() == 4 else torch.int16).numpy()
    whole.reshape(-1)[int(gradient.detach().abs().reshape(-1).float().argmax())] ^= 1 << bit


class Wrong:
    """Flips a bit in the gradient of one weight when a backward pass ends, in one step."""

    def __init__(self, bit: int, rank: int | None, at: int = 1) -> None:
        self._bit, self._rank, self._at, self._step = bit, rank, at, -1

    def __call__(self, model: nn.Module) -> None:
        """Called before each forward pass."""
        self._step += 1
        if self._step == self._at:
            module = getattr(model, "module", model)
            module.head.register_forward_hook(self._begins)

    def _begins(self, *call: Any) -> None:
        if self._step == self._at:
            call[2].register_hook(lambda _: self._at_the_end(call[0]))

    def _at_the_end(self, head: nn.Module) -> None:
        queue: Any = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: self._flip(head)))

    def _flip(self, head: nn.Module) -> None:
        gradient: Any = MODELS[id(head)].get_parameter(SITE).grad
        if not hasattr(gradient, "to_local"):
            if self._rank in (None, torch.distributed.get_rank()):
                in_memory(gradient, self._bit)
        elif torch.distributed.get_rank() == 0:
            in_memory(gradient.to_local(), self._bit)


MODELS: dict[int, nn.Module] = {}


class Kept(Model):
    """A model that is found by its head."""

    def __init__(self) -> None:
        super().__init__()
        MODELS[id(self.head)] = self


ENGINES: dict[str, Callable[[Model], nn.Module]] = {
    "plain": lambda model: model, "ddp": in_ddp, "fsdp2": fully_sharded,
}  # fmt: skip


def record(path: str, engine: str, dtype: str, bit: int | None, rank: int | None, settings: dict[str, Any]) -> None:
    wrong = {} if bit is None else {"before_micro_batch": {0: Wrong(bit, rank)}}
    train(path, ENGINES[engine], make=Kept, dtype=getattr(torch, dtype), observe=OBSERVE, **wrong, **settings)


def found(
    path: Path, engine: str, dtype: str, bit: int | None, rank: int | None = None, **settings: Any
) -> list[Finding]:
    run_on_ranks(record, 1 if engine == "plain" else 2, str(path), engine, dtype, bit, rank, settings)
    return list(traindiff.check(path, rules="wrong-sum").findings)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_element_that_changes_in_a_reduction_is_found(tmp_path: Path, engine: str, dtype: str) -> None:
    (one,) = found(tmp_path / "run", engine, dtype, 10 if dtype == "float32" else 6)

    assert (one.step, one.path, one.kind) == (1, SITE, "wrong-sum")
    assert one.message.startswith(
        "One element of the gradient is not the sum of what ranks and micro-steps contributed"
    )


@pytest.mark.parametrize(("dtype", "bit"), [("float32", 10), ("bfloat16", 6)])
def test_the_rank_whose_copy_is_wrong_is_named(tmp_path: Path, dtype: str, bit: int) -> None:
    (one,) = found(tmp_path / "run", "ddp", dtype, bit, 1)

    assert (one.step, one.path, one.rank) == (1, SITE, 1)
    assert one.message.startswith("One element of the gradient on rank 1 is not the sum")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_right_sums_are_right(tmp_path: Path, engine: str, dtype: str, micro_batches: int) -> None:
    assert found(tmp_path / "run", engine, dtype, None, steps=5, micro_batches=micro_batches) == []


def clip_by_value(model: nn.Module) -> None:
    largest = max(float(one.grad.abs().max()) for one in model.parameters() if one.grad is not None)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.99 * largest)


def zero_one(model: nn.Module) -> None:
    for one in model.parameters():
        assert one.grad is not None
        one.grad.view(-1)[:1].zero_()


def clip_by_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize("change", [clip_by_value, zero_one, clip_by_norm])
def test_what_the_training_changes_is_not_judged(tmp_path: Path, change: Callable[[nn.Module], None]) -> None:
    train(tmp_path / "run", observe=OBSERVE, before_step=change, micro_batches=2)

    assert traindiff.check(tmp_path / "run", rules="wrong-sum").findings == ()


def _largest_is_zero(gradient: Tensor) -> Tensor:
    found = gradient.clone()
    found.view(-1)[int(found.abs().argmax())] = 0.0
    return found


@pytest.mark.parametrize("on", ["tensor", "node"])
def test_what_a_hook_changes_before_it_is_added_is_not_judged(tmp_path: Path, on: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 2))
    weight: Any = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVE, strict=True):
        if on == "tensor":
            weight.register_hook(_largest_is_zero)
        else:
            node.register_prehook(lambda gradients: (_largest_is_zero(gradients[0]),))
        for _ in range(3):
            for _ in range(2):
                model(torch.randn(4, 30)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert traindiff.check(tmp_path / "run").findings == ()
