"""The kernels beside the NumPy reference, which summarizes whatever none of them reads. One entry each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kernel:
    """A kernel, which is imported when there is a tensor for it.

    Attributes:
        module: Has `reads(tensor)`, whether it can summarize it; and `summarize(tensor, shard)` where that is done at
            once, or `DeviceRows(device)`, which collects the summaries of a step, where it is put off.
        device_types: Types of the devices that its tensors are on.
        needs: The package without which there is no such kernel.
    """

    module: str
    device_types: frozenset[str]
    needs: str

    def load(self) -> ModuleType | None:
        """The module; None where the package that it needs is not installed, too old, or cannot be loaded."""
        return _loaded(self)


AT_ONCE: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.summarize", device_types=frozenset({"cpu"}), needs="llvmlite"),
)
"""Kernels that give a summary when they are called; the first that reads a tensor has it.

They have `add_to(rows, tensor, shard)` and `writer(tensor, shard)`, too, for what is one stretch of memory."""

ARRAYS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.arrays", device_types=frozenset({"cpu"}), needs="llvmlite"),
)
"""Kernels that do the same for NumPy arrays, by `reads(array)` and `summarize(array, shard)`, and need no framework."""

TABLES: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.table", device_types=frozenset({"cpu"}), needs="llvmlite"),
)
"""Kernels that summarize many tensors in one call, by `is_one_stretch(shard)` and `Table(tensors)`."""

EXTENTS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.extent", device_types=frozenset({"cpu"}), needs="llvmlite"),
)
"""Kernels that give an extent when they are called, by `reads(tensor)` and `extent(tensor)`."""

PROJECTIONS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.projection", device_types=frozenset({"cpu"}), needs="llvmlite"),
    Kernel(module="traindiff.core.kernels.gpu.projection", device_types=frozenset({"cuda"}), needs="triton"),
)
"""Kernels that multiply matrices by signs: `reads(matrix)`, `projected(...)`, `normalized(...)`, `summed(...)`."""

TABLE_SUMS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.row_sums", device_types=frozenset({"cpu"}), needs="llvmlite"),
    Kernel(module="traindiff.core.kernels.gpu.product_errors", device_types=frozenset({"cuda"}), needs="triton"),
)
"""Kernels that add up both the rows and the columns of matrices: `reads(matrix)`, `table_sums(...)`."""

PRODUCT_ERRORS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.gpu.product_errors", device_types=frozenset({"cuda"}), needs="triton"),
)
"""Kernels that do the sums and their comparison at once: `reads(*matrices)`, `product_errors(...)`."""

ROW_SUMS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.row_sums", device_types=frozenset({"cpu"}), needs="llvmlite"),
)
"""Kernels that add up the rows of matrices: `reads(matrix)`, `row_sums(...)`."""

ROW_ERRORS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.row_errors", device_types=frozenset({"cpu"}), needs="llvmlite"),
)
"""Kernels that compare such sums of two matrices, by `row_errors(...)`."""

CONTRIBUTIONS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.gpu.contribution", device_types=frozenset({"cuda"}), needs="triton"),
)
"""Kernels that say what a use of a parameter contributes, by `contribution(...)`."""

LINEAR_CHECKS: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.cpu.linear_checks", device_types=frozenset({"cpu"}), needs="llvmlite"),
)
"""Kernels that do all of this for a linear layer in one call, by `reads(matrix)`, `Output(...)` and `OfInput(...)`."""

WORDS = Kernel(module="traindiff.core.kernels.cpu.words", device_types=frozenset({"cpu"}), needs="llvmlite")
"""The kernel that adds up 64-bit words in memory: `sums(address, rows)`."""

PUT_OFF: tuple[Kernel, ...] = (
    Kernel(module="traindiff.core.kernels.gpu.rows", device_types=frozenset({"cuda"}), needs="triton"),
)
"""Kernels whose summaries are on their way from a device until they are read; they are asked before the others."""


@cache
def installed(kernels: tuple[Kernel, ...]) -> tuple[tuple[frozenset[str], ModuleType], ...]:
    """The device types and the modules of those kernels whose packages are installed."""
    return tuple((kernel.device_types, module) for kernel in kernels if (module := kernel.load()) is not None)


@cache
def _loaded(kernel: Kernel) -> ModuleType | None:
    try:
        return import_module(kernel.module)
    except OSError:  # the package is there, and its library cannot be loaded
        return None
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == kernel.needs:
            return None
        raise
