"""Real text that every machine has: the source code of Python's standard library."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from traindiff.errors import ConfigError, Problem

VOCABULARY = 256
"""A token is a byte."""

_MODULES = ("argparse", "ast", "bdb", "calendar", "configparser", "dataclasses", "difflib", "doctest")
_MOST_BYTES = 1 << 19
_STRIDE = 7919  # a prime: consecutive samples come from places far apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one step, or of one micro-batch of it.

    Attributes:
        inputs: Bytes, int64 [B, T].
        targets: The byte that follows each of them, int64 [B, T].
        sample_ids: Number of each sample, unique in the whole training, int64 [B].
    """

    inputs: Tensor
    targets: Tensor
    sample_ids: Tensor

    def split(self, parts: int) -> list[Batch]:
        """Micro-batches of equal size, in order; `parts` divides the number of samples."""
        return [
            Batch(inputs=inputs, targets=targets, sample_ids=sample_ids)
            for inputs, targets, sample_ids in zip(
                self.inputs.chunk(parts), self.targets.chunk(parts), self.sample_ids.chunk(parts), strict=True
            )
        ]


def read_text(directory: Path | None = None) -> Tensor:
    """Bytes of a few modules of the standard library, one after the other, in a fixed order.

    The same Python version gives the same text on every machine. Where none of the chosen modules
    is there as source, whatever Python sources the directory holds are taken, in order of their paths.

    Args:
        directory: Where the standard library is; by default that of the running interpreter.

    Returns:
        uint8, one axis, at most 512 KiB.

    Raises:
        ConfigError: The directory holds no Python source (a zipped or stripped installation).
    """
    where = Path(sysconfig.get_path("stdlib")) if directory is None else directory
    chosen = [path for name in _MODULES if (path := where / f"{name}.py").is_file()]
    content = b"".join(path.read_bytes() for path in chosen or sorted(where.rglob("*.py")))
    if not content:
        problem = Problem(
            where=f"standard library in {where}",
            what="holds no Python source files, which are the text that the demo trains on.",
            fix="Use a Python that was installed with its sources, neither zipped nor stripped.",
        )
        raise ConfigError("the demo", [problem], consequence="nothing was trained")
    return torch.frombuffer(bytearray(content[:_MOST_BYTES]), dtype=torch.uint8)


def make_batch(text: Tensor, step: int, *, batch_size: int, context: int, seed: int) -> Batch:
    """The batch of a step: a pure function of its arguments, which draws no random numbers.

    Args:
        text: uint8, one axis, longer than `context`.
        step: Counted from 0.
        batch_size: B, samples in the batch.
        context: T, bytes in a sample.
        seed: Another seed starts elsewhere in the text.
    """
    sample_ids = torch.arange(step * batch_size, (step + 1) * batch_size)
    starts = (sample_ids + seed * _STRIDE) * _STRIDE % (len(text) - context)
    windows = text[starts[:, None] + torch.arange(context + 1)].to(torch.int64)
    return Batch(inputs=windows[:, :-1], targets=windows[:, 1:], sample_ids=sample_ids)
