"""Modes see nothing of what traindiff computes where ranks share the work and results of collectives come later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import traindiff
from tests.observe.hooks.reading import rows
from tests.observe.hooks.seen_by_modes import MODES
from tests.observe.sharding.tensor_parallel import sequence_parallel, with_copies, with_sequence_parallelism
from tests.observe.sharding.transformer import LENGTH, VOCABULARY, Transformer, cross_entropy
from tests.on_ranks import run_on_ranks

SAVED = [
    torch.ops._c10d_functional.wait_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class ByHand(nn.Module):
    """Adds up what its module returns over all ranks, as tensor parallelism by hand does."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        return _AllReduce.apply(self.inside(x))


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return functional_collectives.all_reduce(x, "avg", distributed.group.WORLD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return functional_collectives.all_reduce(gradient.contiguous(), "avg", distributed.group.WORLD)


class Checkpointed(nn.Module):
    def __init__(self, inside: nn.Module, **settings: Any) -> None:
        super().__init__()
        self.inside = inside
        self.settings = settings

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False, **self.settings)


def in_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)


def fully_sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def tensor_parallel_and_fully_sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (1, distributed.get_world_size()), mesh_dim_names=("dp", "tp"))
    sequence_parallel(model, mesh["tp"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def by_hand(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        block.feed_forward = ByHand(block.feed_forward)
    return model


ENGINES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "tensor_parallel": with_copies,
    "sequence_parallel": with_sequence_parallelism,
    "ddp": in_ddp,
    "fsdp2": fully_sharded,
    "tensor_parallel_and_fsdp2": tensor_parallel_and_fully_sharded,
    "by_hand": by_hand,
}


def saving(policy: CheckpointPolicy, _ctx: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return policy if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(what: Any, **settings: Any) -> dict[str, Any]:
    return {"context_fn": partial(create_selective_checkpoint_contexts, what, **settings)}


CHECKPOINTED: dict[str, dict[str, Any] | None] = {
    "not": None,
    "whole": {},
    "must_save": selectively(partial(saving, CheckpointPolicy.MUST_SAVE)),
    "prefer_save": selectively(partial(saving, CheckpointPolicy.PREFER_SAVE)),
    "must_recompute": selectively(partial(saving, CheckpointPolicy.MUST_RECOMPUTE)),
    "prefer_recompute": selectively(partial(saving, CheckpointPolicy.PREFER_RECOMPUTE)),
    "list": {**selectively(SAVED), "preserve_rng_state": False},
    "list_mutable": selectively(SAVED, allow_cache_entry_mutation=True),
}


@contextmanager
def communication() -> Iterator[Callable[[], Any]]:
    with CommDebugMode() as mode:
        yield lambda: {str(operator): count for operator, count in mode.get_comm_counts().items()}


ON_RANKS = {**MODES, "communication": communication, "none": lambda: nullcontext(lambda: ["nothing"])}


def trained(
    engine: str,
    checkpointed: str,
    mode: str,
    observe: Callable[[nn.Module, Any], AbstractContextManager[Any]],
    *,
    early_stop: bool = True,
) -> tuple[Any, list[Tensor]]:
    """What the mode has seen, and the parameters at the end."""
    torch.manual_seed(0)
    model = Transformer(dropout=0.1)
    settings = CHECKPOINTED[checkpointed]
    prepared = ENGINES[engine](model)
    if settings is not None:
        for number, block in enumerate(model.blocks):
            model.blocks[number] = Checkpointed(block, **settings)
    optimizer = torch.optim.AdamW(prepared.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(distributed.get_rank() if engine in ("ddp", "fsdp2") else 7)
    with set_checkpoint_early_stop(early_stop), observe(prepared, optimizer), ON_RANKS[mode]() as seen:
        for _ in range(1 if mode == "communication" else 2):  # CommDebugMode takes each module to be called once
            tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=data)
            cross_entropy(prepared(tokens[:, :-1]), tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return seen(), [one.to_local() if isinstance(one, DTensor) else one.detach() for one in prepared.parameters()]


def differences(engine: str, cases: list[tuple[str, str, bool]], path: str) -> list[str]:
    """What differs with and without a recording, on one of two ranks."""
    found: list[str] = []
    for number, (checkpointed, mode, early_stop) in enumerate(cases):
        case = f"{checkpointed}, {mode}, early stop {early_stop}"
        train = partial(trained, engine, checkpointed, mode, early_stop=early_stop)
        if not number:
            train(lambda *_: nullcontext())  # what torch computes once and keeps, it has computed
        seen, outcome = train(lambda *_: nullcontext())
        recorded_seen, recorded = train(
            lambda model, optimizer, number=number: traindiff.record(
                f"{path}-{number}", model, optimizer, strict=True, evaluation=True
            )
        )
        if seen != recorded_seen:
            lines = [
                f"{one} | {other}" for one, other in zip(list(seen), list(recorded_seen), strict=False) if one != other
            ]
            found.append(f"{case}: sees {len(seen)} and {len(recorded_seen)}, first {lines[:1]}")
        if not seen or not all(torch.equal(one, other) for one, other in zip(outcome, recorded, strict=True)):
            found.append(f"{case}: other bits, or nothing seen")
    return found


def engines(*kept: str) -> list[Any]:
    """All engines, of which a release needs all, and a test these."""
    return [pytest.param(name, marks=() if name in kept else pytest.mark.release) for name in ENGINES]


@pytest.mark.parametrize("engine", engines("fsdp2", "by_hand"))
def test_selective_checkpointing_recomputes_what_it_would_without_a_recording(engine: str, tmp_path: Path) -> None:
    cases = [(checkpointed, "none", True) for checkpointed in CHECKPOINTED]
    cases += [("whole", "none", False), ("must_save", "none", False)]

    found = run_on_ranks(differences, 2, engine, cases, str(tmp_path / "run"), timeout_seconds=400.0)

    assert found == [[], []]
    assert {seen.stage for seen, _ in rows(tmp_path / f"run-{len(cases) - 1}", phase="forward")} >= {"", "recomputed"}


@pytest.mark.parametrize("engine", engines("tensor_parallel", "ddp"))
def test_a_mode_on_a_rank_sees_the_same_with_and_without_a_recording(engine: str, tmp_path: Path) -> None:
    # DebugMode writes out the storages of FSDP2 element by element, each by operators that it sees: it does not end.
    modes = [mode for mode in ON_RANKS if not (mode == "debugging" and "fsdp2" in engine)]
    cases = [(checkpointed, mode, True) for mode in modes for checkpointed in ("not", "must_save")]

    assert run_on_ranks(differences, 2, engine, cases, str(tmp_path / "run"), timeout_seconds=400.0) == [[], []]
