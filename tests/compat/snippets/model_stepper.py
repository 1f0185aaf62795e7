"""What ModelStepper's documentation shows: two engines of one model, an optional failure, and an exit code.

deepspeed --num_gpus 2 tests/compat/snippets/model_stepper.py --deepspeed --deepspeed_config config.json --fail
"""

from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

warnings.simplefilter("ignore")  # DeepSpeed uses names of collectives that torch renames
import deepspeed  # noqa: E402

from traindiff.compat.deepspeed import ModelStepper  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled when first used, which takes minutes


class SmallNet(nn.Module):
    """Two convolutions, two linear layers, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 8, 3)
        self.hidden = nn.Linear(8 * 4 * 4, 16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.first(images)), 2)
        x = functional.relu(self.second(x)).flatten(1)
        return functional.cross_entropy(self.head(functional.relu(self.hidden(x))), labels)


def loader_of(size: int, num: int) -> DataLoader[Any]:
    """Images of noise, other ones on each rank; its batches are lists of images and labels."""
    data = torch.Generator().manual_seed(3)
    total = num * size * torch.distributed.get_world_size()
    images, labels = torch.randn(total, 3, 14, 14, generator=data), torch.randint(10, (total,), generator=data)
    samples = TensorDataset(images, labels)
    return DataLoader(samples, batch_size=size, sampler=DistributedSampler(samples, shuffle=False))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="as the launchers of DeepSpeed give it")
    parser.add_argument("--fail", action="store_true", help="give the tested engine a learning rate of 0")
    args = deepspeed.add_config_arguments(parser).parse_args(arguments)

    torch.manual_seed(1138)
    base_net, test_net = SmallNet(), SmallNet()
    test_net.load_state_dict(base_net.state_dict())
    base_engine, *_ = deepspeed.initialize(
        args=args, model=base_net, optimizer=torch.optim.Adam(base_net.parameters()),
        model_parameters=base_net.parameters(), dist_init_required=True,
    )  # fmt: skip
    test_opt = torch.optim.Adam(test_net.parameters(), lr=0.0 if args.fail else 1e-3)
    test_engine, *_ = deepspeed.initialize(
        args=args, model=test_net, optimizer=test_opt, model_parameters=test_net.parameters(),
        dist_init_required=False,
    )  # fmt: skip
    trainloader = loader_of(base_engine.train_micro_batch_size_per_gpu(), num=8)

    stepper = ModelStepper(
        base_engine, test_engine, trainloader,
        num_batches=6, test_every=1, status_every=5, loss_tol=1e-5, track_grads=True, track_params=True,
    )  # fmt: skip
    success = stepper.go()
    return 0 if success else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
