"""Early warnings: numbers near the end of their range, more zeros, what a shorter dtype would lose."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from traindiff.core.kernels.element_details import EXPONENT_FIRST, exponents
from traindiff.core.kernels.extent import stored_values
from traindiff.errors import UnsupportedTensorError
from traindiff.observe.torch.nonfinite.reading import Reading

EVERY = 100
"""Steps between two looks at samples, and between two warnings of one kind."""

SAMPLE = 4096
"""Elements of a tensor that are looked at, evenly spread."""

NEAR = 4.0
"""A magnitude is near the largest number of its dtype within this factor: two doublings."""

_FEWEST = 256
"""Elements below which a share says nothing."""

_MASK = 0.99
"""From this share of the largest number on it is a mask that stands for -inf (`torch.finfo(dtype).min`)."""

_ZEROS_RISE, _ZEROS = 0.25, 0.5
_SUBNORMALS_RISE, _SUBNORMALS = 0.01, 0.02
_LOST = 0.01

_RANGES = {"float16": (16, -25), "bfloat16": (128, -134), "float8_e4m3fn": (9, -10), "float8_e5m2": (16, -17)}
"""Binary exponents from which on numbers overflow, and below which they become zero (IEEE 754; OCP 8-bit formats)."""


class EarlyWarnings:
    """Warns of what may become NaN or infinite, or be lost.

    Args:
        wanted: Some of `traindiff.observe.torch.nonfinite.settings.WARNINGS`.
        warn: Called with what is to be said, at most once in `EVERY` steps for each kind.
    """

    def __init__(self, wanted: Collection[str], *, warn: Callable[[str], None]) -> None:
        self._wanted = frozenset(wanted)
        self._samples = bool(self._wanted - {"limit"})
        self._warn = warn
        self._near: list[tuple[str, Reading]] = []
        self._taken: list[tuple[str, torch.dtype, Tensor]] = []
        self._first: dict[tuple[str, str], float] = {}
        self._warned: dict[str, int] = {}

    def look(self, path: str, slot: str, reading: Reading, tensor: Tensor, *, step: int, scaled: bool = False) -> None:
        """Look at an output, or a gradient. Waits for nothing.

        Args:
            path: Of the module.
            slot: Of the tensor.
            reading: What was read of it.
            tensor: Itself.
            step: Now.
            scaled: Whether a loss scale is in it, which is raised until the tensor overflows: that it is near the end
                of its range is no sign.
        """
        if not reading.dtype.is_floating_point or reading.reason:
            return
        extent = reading.extent
        if (
            "limit" in self._wanted
            and not scaled
            and (extent is None or extent.largest > torch.finfo(reading.dtype).max / NEAR)
        ):
            self._near.append((f"{path} {slot}", reading))
        if self._samples and step % EVERY == 0 and tensor.numel():
            try:
                values = stored_values(tensor).reshape(-1)
            except (RuntimeError, UnsupportedTensorError):
                return
            self._taken.append((f"{path} {slot}", reading.dtype, values[:: -(-values.numel() // SAMPLE)].float()))

    def end_step(self, step: int) -> None:
        """Say what was seen in this step. Waits for devices once in `EVERY` steps, if at all."""
        near = [one for one in self._near if one[1].has_arrived and _is_near(one[1])]
        self._near = [one for one in self._near if not one[1].has_arrived]
        self._say_near(near, step)
        taken, self._taken = self._taken, []
        if taken:
            self._say_samples(taken, step)

    def let_go(self) -> None:
        """Forget all samples."""
        self._near.clear()
        self._taken.clear()

    def _say_near(self, near: list[tuple[str, Reading]], step: int) -> None:
        if not near or not self._is_due("limit", step):
            return
        site, reading = max(near, key=lambda one: _share_of_limit(one[1]))
        dtype = str(reading.dtype).removeprefix("torch.")
        assert reading.extent is not None
        self._say(
            "limit", step, len(near),
            f"{site} reaches {reading.extent.largest:.3g}, within a factor of {NEAR:g} of {dtype}'s largest number, "
            f"{torch.finfo(reading.dtype).max:.3g}",
        )  # fmt: skip

    def _say_samples(self, taken: list[tuple[str, torch.dtype, Tensor]], step: int) -> None:
        found: dict[str, list[tuple[float, str]]] = {}
        together: dict[tuple[str, torch.dtype], list[Tensor]] = {}
        for site, dtype, sample in taken:
            together.setdefault((site, dtype), []).append(sample)
        for (site, dtype), samples in together.items():
            values = np.abs(torch.cat(samples).cpu().numpy())
            if values.size < _FEWEST:
                continue
            tiny = torch.finfo(dtype).smallest_normal
            for sign, kind, are, least, rise in (
                ("zeros", "zero", values == 0, _ZEROS, _ZEROS_RISE),
                ("subnormals", "subnormal", (values > 0) & (values < tiny), _SUBNORMALS, _SUBNORMALS_RISE),
            ):
                share = float(are.mean())
                before = self._first.setdefault((site, sign), share)
                if share >= least and share - before >= rise:
                    message = f"{share:.0%} of {site} are {kind}, up from {before:.0%}"
                    found.setdefault(sign, []).append((share, message))
            for name in [name for name in _RANGES if name in self._wanted]:
                if dtype.itemsize > (1 if name.startswith("float8") else 2) or str(dtype) == "torch.bfloat16":
                    _add_lost(found, name, site, values)
        for sign, sites in found.items():
            if sign in self._wanted and self._is_due(sign, step):
                self._say(sign, step, len(sites), max(sites)[1])

    def _is_due(self, sign: str, step: int) -> bool:
        return step - self._warned.get(sign, -EVERY) >= EVERY

    def _say(self, sign: str, step: int, num_sites: int, message: str) -> None:
        self._warned[sign] = step
        more = f" (and {num_sites - 1} more sites)" if num_sites > 1 else ""
        self._warn(f"step {step}: {message}{more}. watch(warn=...) chooses what is said.")


def _is_near(reading: Reading) -> bool:
    return 1 / NEAR < _share_of_limit(reading) < _MASK


def _share_of_limit(reading: Reading) -> float:
    if reading.extent is None or not reading.extent.is_finite or not reading.extent.count:
        return 0.0
    return reading.extent.largest / torch.finfo(reading.dtype).max


def _add_lost(found: dict[str, list[tuple[float, str]]], name: str, site: str, values: NDArray[np.float32]) -> None:
    """What a shorter dtype would make of a sample."""
    counts = exponents(values)
    total = int(counts.sum())
    if not total:
        return
    overflow, zero = _RANGES[name]
    over = int(counts[overflow - EXPONENT_FIRST :].sum()) / total
    under = int(counts[: zero - EXPONENT_FIRST].sum()) / total
    if over or under >= _LOST:
        what = [f"{over:.2%} would overflow"] * bool(over) + [f"{under:.1%} would become zero"] * (under >= _LOST)
        found.setdefault(name, []).append((over + under, f"of {site}, {' and '.join(what)} in {name}"))
