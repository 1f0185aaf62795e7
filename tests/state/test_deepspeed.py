"""Checkpoints that DeepSpeed itself has written, of every stage of ZeRO, on one rank and on several."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn

import traindiff
from tests.observe.sharding.deepspeed_training import import_deepspeed
from tests.on_ranks import run_on_ranks
from traindiff.state.comparison import Relation, WeightsComparison
from traindiff.state.sources.opening import open_checkpoint

pytestmark = [pytest.mark.deepspeed, pytest.mark.filterwarnings("ignore")]

STAGES = (0, 1, 2, 3)


class Model(nn.Module):
    """With a frozen layer, a buffer, tied weights, and parameters that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 9)
        self.norm = nn.BatchNorm1d(9, affine=False)
        self.outer = nn.Linear(9, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.frozen(self.outer(torch.tanh(self.norm(self.inner(self.table(x)))))))
        return found


def train(directory: str, dtype: str) -> list[list[str]]:
    """Train with every stage, save, and write what the engine says that it holds; on every rank.

    Returns:
        By stage, what differs between what was saved and what this rank holds in memory, asked for by it alone.
    """
    deepspeed = import_deepspeed()
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    apart = []
    for stage in STAGES:
        torch.manual_seed(0)
        model = Model()
        trained = [one for one in model.parameters() if one.requires_grad]
        groups = [
            {"params": [one for one in trained if (one.dim() > 1) is matrices], "weight_decay": 0.1 * matrices}
            for matrices in (True, False)
        ]
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "steps_per_print": None}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2),
            config={**config, "bf16": {"enabled": dtype == "bfloat16"}, "zero_allow_untested_optimizer": True},
        )  # fmt: skip
        for step in range(2):
            batch = torch.randint(11, (4,), generator=torch.Generator().manual_seed(9 * step + distributed.get_rank()))
            engine.backward(nn.functional.cross_entropy(engine(batch).float(), batch))
            engine.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.save_checkpoint(f"{directory}/{stage}")
        held = {}
        for name, one in engine.module.named_parameters():
            if one.requires_grad:
                value = safe_get_full_fp32_param(one)
                held[name] = (one if value is None else value).detach().clone()
            if one.dim() > 1 and one.requires_grad and stage:
                held[f"optimizer.state.{name}.exp_avg"] = safe_get_full_optimizer_state(one, "exp_avg").clone()
        held |= dict(engine.module.named_buffers())
        torch.save(held, f"{directory}/{stage}-held-{distributed.get_rank()}.pt")
        distributed.barrier()
        for rank in range(distributed.get_world_size()):
            if rank == distributed.get_rank():
                found = traindiff.weights(f"{directory}/{stage}", engine.module)
                apart.append([one.name for one in (*found.differences, *_only(found))])
            distributed.barrier()
    return apart


def _only(found: WeightsComparison) -> list[Relation]:
    return [one for one in found.relations if one.word == "only"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_deepspeed_has_saved_is_what_it_held(tmp_path: Path, ranks: int, dtype: str) -> None:
    of_ranks = run_on_ranks(train, ranks, str(tmp_path), dtype, timeout_seconds=400)

    own = ["norm.running_mean", "norm.running_var"]  # each rank has its own; those of the first one are saved
    assert of_ranks == [[[]] * len(STAGES), *[[own] * len(STAGES)] * (ranks - 1)]
    for stage in STAGES:
        held = torch.load(tmp_path / f"{stage}-held-0.pt")
        found = open_checkpoint(tmp_path / str(stage)).tensors
        assert {"frozen.weight", "head.weight", "norm.running_mean", *held} <= found.keys()
        for name, value in held.items():
            tensor = found[name]
            assert (tensor.dtype, tensor.shape) == (str(value.dtype).removeprefix("torch."), tuple(value.shape)), name
            got = b"".join(tensor.slab(*slab).tobytes() for slab in tensor.slabs)
            assert got == value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), (stage, name)


def save_experts(directory: str, ranks: int) -> None:
    """Save a model with experts on so many expert ranks, and what this rank holds of them."""
    deepspeed = import_deepspeed()
    from deepspeed.moe.layer import MoE

    torch.manual_seed(distributed.get_rank())
    layers = [MoE(4, expert=nn.Linear(4, 4), num_experts=count, ep_size=ranks) for count in (2, 4)]
    model = nn.Sequential(nn.Linear(4, 4), *layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "steps_per_print": None}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.save_checkpoint(directory, tag="saved")
    held = {}
    for name, value in engine.module.state_dict().items():
        before, inside, after = name.partition(".deepspeed_experts.")
        if inside:
            number, _, rest = after.partition(".")
            own = layers[int(before[0]) - 1].num_local_experts * distributed.get_rank() + int(number)
            held[f"{before}{inside}{own}.{rest}"] = value.clone()
        else:
            held[name] = value.clone()
    torch.save(held, f"{directory}/held-{distributed.get_rank()}.pt")


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_that_deepspeed_has_saved_are_those_that_all_ranks_held(tmp_path: Path, ranks: int) -> None:
    run_on_ranks(save_experts, ranks, str(tmp_path), ranks, timeout_seconds=400)

    held = {}
    for rank in reversed(range(ranks)):
        held |= torch.load(tmp_path / f"held-{rank}.pt")
    result = traindiff.weights(tmp_path, held)

    assert sum("deepspeed_experts" in name for name in held) == 12
    assert (result.verdict, len(result.relations)) == ("identical", len(held))
