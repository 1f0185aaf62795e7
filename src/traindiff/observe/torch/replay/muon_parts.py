"""What adds up of an update of Muon, if each rank holds rows or columns of a matrix.

Muon orthogonalizes whole matrices, and a rank that holds a part of one cannot compute its update. But squared norms,
inner products and Gram matrices are sums over ranks, and they tell whether the update may be orthogonal. See
`traindiff.core.orthogonality` for what a reader concludes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from traindiff.core.orthogonality import PROBES, SIZE
from traindiff.core.shards import Shard
from traindiff.core.witness import signs
from traindiff.observe.torch.replay.muon import adjustment, momentum_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The division of a matrix over ranks.

    Attributes:
        shape: Shape of the matrix.
        dim: The dim that is divided: 0 if a rank holds rows, 1 if it holds columns.
        first: The first row or column here.
    """

    shape: tuple[int, int]
    dim: int
    first: int


def division_of(shard: Shard | None) -> Division | None:
    """How a matrix is divided; None if a rank holds no whole rows or columns of it, or no part of a matrix."""
    if shard is None or len(shard.global_shape) != 2 or len(shard.shape) != 2 or len(shard.offset) != 2:
        return None
    dims = [dim for dim in (0, 1) if shard.shape[dim] != shard.global_shape[dim]]
    if len(dims) != 1:
        return None
    rows, columns = shard.global_shape
    return Division(shape=(rows, columns), dim=dims[0], first=shard.offset[dims[0]])


def terms(
    parameter: Tensor,
    gradient: Tensor,
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    new: Tensor,
    unit: float,
    division: Division,
    path: str,
) -> Tensor | None:
    """This rank's terms of the sums in `traindiff.core.orthogonality`; None if the learning rate is 0.

    Args:
        parameter: What this rank holds of the parameter before the step, float64, [rows, columns].
        gradient: The same of its gradient, unscaled.
        state: The same of its state.
        settings: Settings of its group, as numbers.
        new: The parameter after the step.
        unit: Unit roundoff of its dtype.
        division: Its place in the parameter.
        path: Path of the parameter.

    Returns:
        float64, shape (SIZE,), on the device of the parameter.
    """
    lr, decay = float(settings["lr"]), float(settings.get("weight_decay", 0.0))
    scale = lr * float(adjustment(division.shape, settings.get("adjust_lr_fn")))
    if not scale:
        return None
    update = (parameter * (1.0 - lr * decay) - new) / scale
    rounding = unit * (parameter.abs() + new.abs()) / scale
    momentum: Any = momentum_of(gradient, state, settings)
    if division.dim == 1:
        update, momentum = update.mT, momentum.mT
    short = momentum.float()
    gram = short.mT @ short if short.shape[0] > short.shape[1] else short @ short.mT
    probes = signs(path, "columns", 0, update.shape[1])[:, :PROBES]
    seen = update @ torch.from_numpy(probes).to(update)
    found = [
        torch.tensor(-1.0 if division.dim else 1.0, dtype=torch.float64, device=update.device) * len(update),
        update.square().sum(), rounding.square().sum(), momentum.square().sum(), (momentum * update).sum(),
        torch.linalg.matrix_norm(gram).double(), *seen.square().sum(dim=0),
    ]  # fmt: skip
    vector = torch.stack(found)
    assert vector.shape == (SIZE,)
    return vector
