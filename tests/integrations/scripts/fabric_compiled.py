"""A compiled model in Fabric: bfloat16, two micro-batches in a step, clipped gradients."""

import sys

import torch
from lightning.fabric import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

seed_everything(3)
fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
fabric.launch()
plain = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 3))
model, optimizer = fabric.setup(
    torch.compile(plain, backend="aot_eager"), torch.optim.AdamW(plain.parameters(), lr=1e-2)
)
data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
for number, (x, y) in enumerate(fabric.setup_dataloaders(DataLoader(data, batch_size=4, shuffle=True))):
    accumulates = number % 2 == 0
    with fabric.no_backward_sync(model, enabled=accumulates):
        fabric.backward(nn.functional.cross_entropy(model(x), y) / 2)
    if not accumulates:
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
torch.save(plain.state_dict(), sys.argv[1])
