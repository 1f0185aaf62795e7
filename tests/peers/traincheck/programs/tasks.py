"""Data that small models learn within seconds, and the recording that a program is given."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Record = Callable[..., AbstractContextManager[Any]]
"""`traindiff.record` without its path; or a function that records nothing, and returns `nullcontext()`."""

CLASSES = 4

VOCABULARY = 32


def points(number: int, *, samples: int = 32, width: int = 20) -> tuple[Tensor, Tensor]:
    """Batch `number` of noisy points around four centers: [samples, width] float32, and [samples] labels."""
    centers = 2.0 * torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return centers[labels] + torch.randn(samples, width, generator=generator), labels


def images(number: int, *, samples: int = 32, size: int = 8) -> tuple[Tensor, Tensor]:
    """Batch `number` of noisy images of four kinds: [samples, 3, size, size] float32, and [samples] labels."""
    kinds = torch.randn(CLASSES, 3, size, size, generator=torch.Generator().manual_seed(99))
    generator = torch.Generator().manual_seed(number)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return kinds[labels] + 0.5 * torch.randn(samples, 3, size, size, generator=generator), labels


def sentences(number: int, *, samples: int = 8, length: int = 16) -> Tensor:
    """Batch `number` of token sequences in which each token follows from the one before: [samples, length] int64."""
    generator = torch.Generator().manual_seed(number)
    rows = [torch.randint(VOCABULARY, (samples,), generator=generator)]
    for _ in range(length - 1):
        rows.append((3 * rows[-1] + 1 + torch.randint(3, (samples,), generator=generator)) % VOCABULARY)
    return torch.stack(rows, dim=1)
