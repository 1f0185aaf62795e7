"""The demo's GPT under autocast, its batches accumulated, gradients clipped: python gpt.py WEIGHTS."""

import sys

import torch

from traindiff.run.demo.model import LanguageModel, ModelSize, build_model

torch.manual_seed(7)
model = build_model(LanguageModel, ModelSize(num_layers=2, num_heads=2, width=32, context=16), seed=1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
for step in range(3):
    for share in range(2):
        tokens = torch.randint(256, (2, 17))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens[:, :-1], tokens[:, 1:], torch.arange(2) + 2 * share, step=step)
        (loss / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
torch.save(model.state_dict(), sys.argv[1])
