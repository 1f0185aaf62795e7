"""transformers #34204: a processor of images and texts returns all images, and the text of one sample only.

The one text is broadcast over all images, so that nothing fails.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.peers.traincheck.programs.tasks import CLASSES, VOCABULARY, Record, images


class Captioned(nn.Module):
    """Classifies images with the help of a text."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.vision = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, width))
        self.words, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, CLASSES)

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(functional.gelu(self.vision(pixel_values) + self.words(input_ids).mean(dim=1)))
        return logits


def processed(number: int, *, faulty: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Images and texts as the model wants them, and labels."""
    pixels, labels = images(number)
    generator = torch.Generator().manual_seed(number)
    texts = (8 * labels[:, None] + torch.randint(8, (len(labels), 6), generator=generator)) % VOCABULARY
    return {"pixel_values": pixels, "input_ids": texts[:1] if faulty else texts}, labels


def train(record: Record, *, faulty: bool) -> None:
    """Train on images with texts."""
    torch.manual_seed(0)
    model = Captioned()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with record(model, optimizer):
        for step in range(12):
            batch, labels = processed(step, faulty=faulty)
            optimizer.zero_grad()
            functional.cross_entropy(model(**batch), labels).backward()
            optimizer.step()
