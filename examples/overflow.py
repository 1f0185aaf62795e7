"""A training in float16 whose activations grow until they overflow: `python examples/overflow.py`."""

import torch
from torch import Tensor, nn

import traindiff


class Gated(nn.Module):
    """Two products, of which one gates the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wi_0 = nn.Linear(width, 4 * width, bias=False)
        self.wi_1 = nn.Linear(width, 4 * width, bias=False)
        self.act = nn.GELU()
        self.wo = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        return self.wo(self.act(self.wi_0(x)) * self.wi_1(x))


def main() -> None:
    """Train with a learning rate that is far too large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), Gated(64), nn.Dropout(0.1), nn.Linear(64, 64)).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=8.0)
    with traindiff.watch(model, optimizer, frames=7):
        for _ in range(50):
            inputs = torch.randn(32, 64, dtype=torch.float16)
            loss = -model(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
