"""The generators that trainings draw from: each side starts a batch from the same state of them."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The state of torch's, Python's and, where it is loaded, NumPy's global generators."""

    cpu: Tensor
    cuda: Tensor | None
    python: tuple[Any, ...]
    numpy: Any

    @classmethod
    def now(cls) -> RandomState:
        """The state as it is; draws nothing and waits for no device."""
        numpy = sys.modules.get("numpy")
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        return cls(
            cpu=torch.get_rng_state(),
            cuda=torch.cuda.get_rng_state() if cuda else None,
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy is not None else None,
        )

    def restore(self) -> None:
        """Have the generators go on from here."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
