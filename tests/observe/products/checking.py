"""Run an operator, and check what it returned as the tap does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from traindiff.core.torch_compat.operators import operator_schema
from traindiff.observe.torch.products.operators import Checked, Kind, kind_of

aten: Any = torch.ops.aten


def checked(
    operator: Any, *args: Any, spoiled: Callable[[Any], Any] = lambda output: output, **kwargs: Any
) -> list[Checked]:
    """The checks of a call; `spoiled` changes what it returned."""
    names = [one.name for one in operator_schema(operator).arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    kind = kind_of(str(operator).rpartition(".")[0])
    assert isinstance(kind, Kind)
    before = kind.before(given)
    return list(kind.check(given, before, spoiled(operator(*args, **kwargs))))


def only(operator: Any, *args: Any, **kwargs: Any) -> Checked:
    (one,) = checked(operator, *args, **kwargs)
    return one


def worst(one: Checked) -> float:
    """The largest error of a row, in units of what its format allows."""
    return float(one.residual.rows.max())


def ratio(one: Checked) -> float:
    """The error of the whole, in units of what its format allows."""
    return float(one.residual.error / one.residual.allowed)


def drawn(kind: str, *shape: int, seed: int = 0) -> Tensor:
    """Numbers of some kind that trainings have, and of some kinds that are hard to add up; float64."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    match kind:
        case "positive":
            return x.abs()
        case "constant":
            return torch.full_like(x, 0.1)
        case "skewed":
            return x * torch.exp(3.0 * torch.roll(x, 1))
        case "sparse":
            return x.clamp_min(0.5) - 0.5
        case "shifted":
            return x + 5.0
        case "tiny":
            return x * 1e-30
        case "alternating":
            return x.abs() * (1.0 - 2.0 * (torch.arange(shape[-1]) % 2))
    return x


KINDS = ("normal", "positive", "constant", "skewed", "sparse", "shifted", "tiny", "alternating")
