"""Is this configuration of DeepSpeed right? An engine in lockstep with DistributedDataParallel and torch's AdamW.

    deepspeed examples/lockstep_deepspeed.py --deepspeed_config examples/ds_config.json
    torchrun --nproc-per-node 2 examples/lockstep_deepspeed.py --deepspeed_config examples/ds_config.json

`--fail` gives the engine a learning rate of 0. Runs on GPUs, and on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import traindiff

warnings.simplefilter("ignore", FutureWarning)  # DeepSpeed uses names of collectives that torch renames
import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402

VOCABULARY, WIDTH, LENGTH = 97, 64, 32


class Block(nn.Module):
    """A perceptron over mixed positions, beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(LENGTH, LENGTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, WIDTH] -> the same shape."""
        x = self.norm(x)
        return x + self.mlp(x + self.mix(x.mT).mT)


class Model(nn.Module):
    """[batch, length] of tokens -> [batch, length, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(2)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next token."""
        return self.head(self.blocks(self.embed(tokens)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of this rank's samples, which both sides minimize."""
    return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def make_model() -> Model:
    """Both sides, and all ranks, begin with the same parameters."""
    torch.manual_seed(0)
    return Model().to(get_accelerator().current_device_name())


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of torch's AdamW that the configuration asks for."""
    return {name: value for name, value in config["optimizer"]["params"].items() if name != "torch_adam"}


def batches_of_rank(rank: int, num: int, size: int) -> list[Tensor]:
    """Batches of random tokens, other ones on each rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    device = get_accelerator().current_device_name()
    return [torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator).to(device) for _ in range(num)]


def main() -> int:
    """Train both sides in lockstep; 0 if they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, help="configuration of the engine")
    parser.add_argument("--fail", action="store_true", help="give the engine a learning rate of 0")
    parser.add_argument("--batches", type=int, default=10, help="how many to train on")
    parser.add_argument("--local_rank", type=int, help="as the launchers of DeepSpeed give it")
    options = parser.parse_args()

    # Only for communication inside one machine's CPU; it would be compiled for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed("gloo" if get_accelerator().device_name() == "cpu" else None, verbose=False)

    config = json.loads(Path(options.deepspeed_config).read_text())
    model = make_model()
    baseline = DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), **settings_of(config))
    if options.fail:
        config["optimizer"]["params"]["lr"] = 0.0
    other = make_model()
    engine, *_ = deepspeed.initialize(model=other, model_parameters=other.parameters(), config=config)

    size = config["train_micro_batch_size_per_gpu"]
    data = batches_of_rank(torch.distributed.get_rank(), options.batches, size)
    comparison = traindiff.Lockstep(baseline, engine, data, loss=loss_of).go()
    torch.distributed.destroy_process_group()
    return comparison.exit_code


if __name__ == "__main__":
    sys.exit(main())
