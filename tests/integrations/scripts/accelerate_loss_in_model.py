"""A compiled model that returns logits and loss, prepared by Accelerate: bfloat16, two micro-batches in a step."""

import sys

import accelerate
import torch
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 16), nn.GELU()), nn.Linear(16, 3)

    def forward(self, x, y):
        logits = self.head(self.body(x))
        return logits, nn.functional.cross_entropy(logits, y)


accelerate.utils.set_seed(3)
accelerator = accelerate.Accelerator(
    cpu=True, gradient_accumulation_steps=2, mixed_precision="bf16",
    dynamo_plugin=TorchDynamoPlugin(backend="aot_eager"),
)  # fmt: skip
plain = Classifier()
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
loader = DataLoader(data, batch_size=4, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(plain, optimizer, loader, scheduler)
for x, y in loader:
    with accelerator.accumulate(model):
        _, loss = model(x, y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
torch.save(plain.state_dict(), sys.argv[1])
