"""The formula of Adafactor. It needs whole parameters: it averages over rows, over columns and over everything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from traindiff.observe.torch.replay.rounded import maximum, minimum

ADAFACTOR_MISTAKES = (
    "no-clipping", "not-scaled-by-parameter", "no-relative-step", "state-late", "not-factored", "fixed-decay",
    "rows-only", "columns-only", "not-normalized", "eps-added", "clipped-by-norm", "decay-after-step",
)  # fmt: skip


def adafactor(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of Adafactor.

        alpha = max(eps2, rms(p)) * min(lr, 1 / sqrt(t));  w = t^beta2_decay
        r = r + w * (mean of g^2 over columns - r);  c = c + w * (mean of g^2 over rows - c)
        v = max(r c / max(mean(r), eps1), eps1^2)        (of vectors: v + w * (g^2 - v))
        u = g / sqrt(v)
        p = p * (1 - lr * weight_decay) - alpha / max(1, rms(u) / d) * u

    Source: Shazeer and Stern, Adafactor, ICML 2018, algorithms 4 and 5; torch.optim.Adafactor.
    """
    lr, (eps1, eps2) = settings["lr"], settings["eps"]
    g = -gradient if settings.get("maximize") else gradient
    t, root = state.get("step", 0.0) + 1.0, math.sqrt(gradient.numel())
    share = 0.001 if wrong == "fixed-decay" else t ** settings["beta2_decay"]
    rate = lr if wrong == "no-relative-step" else minimum(lr, t**-0.5)
    if wrong != "not-scaled-by-parameter":
        rate = maximum(parameter.norm() / root, eps2) * rate
    scale = _variance(g, state, share, eps1, wrong)
    scale = scale + eps1 * eps1 if wrong == "eps-added" else scale.clamp(eps1 * eps1)
    update = scale.rsqrt() * g
    if wrong != "no-clipping":
        count = 1.0 if wrong == "clipped-by-norm" else root
        update = update / maximum(update.norm() / (count * settings["d"]), 1.0)
    kept = 1.0 - lr * settings.get("weight_decay", 0.0)
    if wrong == "decay-after-step":
        return (parameter - rate * update) * kept
    return (parameter * kept if settings.get("weight_decay") else parameter) - rate * update


def _variance(g: Any, state: Any, share: Any, eps1: Any, wrong: str) -> Any:
    """The estimate of the squared gradient's mean."""
    if len(g.shape) < 2 or wrong == "not-factored":
        held = state.get("variance", 0.0 * g)
        return held if wrong == "state-late" else held + share * (g.square() - held)
    rows, columns = (
        g.norm(dim=dim, keepdim=True).square() / g.shape[dim] for dim in (-1, -2)
    )  # the mean over columns of each row, and over rows of each column
    old_rows, old_columns = state.get("row_var", 0.0 * rows), state.get("col_var", 0.0 * columns)
    if wrong == "state-late":
        rows, columns = old_rows, old_columns
    else:
        rows = old_rows + share * (rows - old_rows)
        columns = old_columns + share * (columns - old_columns)
    if wrong == "rows-only":
        return rows + 0.0 * g
    if wrong == "columns-only":
        return columns + 0.0 * g
    product = rows * columns
    return product if wrong == "not-normalized" else product / rows.mean(dim=-2, keepdim=True).clamp(eps1)


def adafactor_settings(_optimizer: Any, group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group. Without eps1, torch takes the spacing of the dtype of the first parameter."""
    eps1, eps2 = group["eps"]
    if eps1 is None:
        first = next((one for one in group["params"] if one.grad is not None), group["params"][0])
        eps1 = torch.finfo(first.dtype).eps
    return {**group, "eps": (eps1, eps2)}
