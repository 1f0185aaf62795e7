"""A plain training, in a function, with a data loader, dropout, accumulation and evaluation: python mlp.py WEIGHTS."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main(path: str) -> None:
    torch.manual_seed(3)
    teacher = nn.Linear(6, 3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.GELU(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = torch.randn(32, 6)
    loader = DataLoader(TensorDataset(inputs, teacher(inputs).argmax(1)), batch_size=4, shuffle=True)
    for _ in range(2):
        model.train()
        for number, (x, y) in enumerate(loader):
            nn.functional.cross_entropy(model(x), y).div(2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            sys.stdout.write(f"{nn.functional.cross_entropy(model(inputs), teacher(inputs).argmax(1)):.4f}\n")
    torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main(sys.argv[1])
