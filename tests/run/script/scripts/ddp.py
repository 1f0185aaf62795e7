"""A model under DistributedDataParallel, wrapped behind its optimizer: torchrun ... ddp.py WEIGHTS."""

import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
rank = distributed.get_rank()
torch.manual_seed(11)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
replicated = DistributedDataParallel(model)
for step in range(3):
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))[rank::2]
    replicated(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    torch.save(model.state_dict(), sys.argv[1])
distributed.barrier()
distributed.destroy_process_group()
