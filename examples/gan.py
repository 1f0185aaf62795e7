"""A generator and a discriminator, trained in turn. `traindiff run -o runs/gan examples/gan.py` records them.

python examples/gan.py [WEIGHTS]
"""

import sys

import torch
from torch import nn


class Generator(nn.Module):
    """Makes images of noise."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """Noise [B, 4] -> images [B, 6]."""
        return self.body(noise)


class Discriminator(nn.Module):
    """Tells images from those that were made."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Images [B, 6] -> logits [B, 1]."""
        return self.body(image)


torch.manual_seed(5)
generator, discriminator = Generator(), Discriminator()
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
judge = nn.BCEWithLogitsLoss()
real, fake = torch.ones(8, 1), torch.zeros(8, 1)

for _ in range(4):
    images = torch.randn(8, 6) * 2 + 1
    of_discriminator.zero_grad()
    judge(discriminator(images), real).backward()
    made = generator(torch.randn(8, 4))
    judge(discriminator(made.detach()), fake).backward()
    of_discriminator.step()
    of_generator.zero_grad()
    judge(discriminator(made), real).backward()
    of_generator.step()

if len(sys.argv) > 1:
    torch.save({"generator": generator.state_dict(), "discriminator": discriminator.state_dict()}, sys.argv[1])
