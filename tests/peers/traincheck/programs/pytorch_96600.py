"""pytorch #96600: data is lost on the way between two GPUs, here in the all-reduce of gradients.

The issue comes from GPUs whose peer-to-peer access does not work. As in TrainCheck's script, a transfer that fails
leaves zeros.
"""

# No `from __future__ import annotations`: the wrapper looks at the annotation of the hook.
import torch
from torch import Tensor, nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.peers.traincheck.programs.tasks import CLASSES, Record, points

RANKS = 2

LOST = frozenset({3, 7})
"""Reductions of which rank 1 receives nothing."""


def train(record: Record, *, faulty: bool) -> None:
    """Train on two ranks; in the faulty program, rank 1 receives zeros from some reductions."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    wrapped = DistributedDataParallel(model)
    done = 0

    def reduce(_: object, bucket: GradBucket) -> Future[Tensor]:
        nonlocal done
        done += 1
        lost = faulty and rank == 1 and done in LOST
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda _: bucket.buffer().zero_() if lost else bucket.buffer() / RANKS)

    wrapped.register_comm_hook(None, reduce)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.05)
    with record(wrapped, optimizer):
        for step in range(10):
            inputs, labels = points(2 * step + rank)
            optimizer.zero_grad()
            functional.cross_entropy(wrapped(inputs), labels).backward()
            optimizer.step()
