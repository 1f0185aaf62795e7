"""The formula of Muon, and Newton-Schulz iterations with the noise of their short dtype. Needs whole matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from traindiff.observe.torch.replay.rounded import Rounded

DEVIATIONS = 6.0
"""How many standard deviations of its noise an element of an orthogonalized matrix may be off."""

DRAWS = 3
"""The number of times that the noise is drawn."""

ORIGINAL = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients, which torch.optim.Muon uses by default."""

MUON_MISTAKES = (
    "other-nesterov", "no-momentum", "summed-momentum", "state-late", "not-orthogonalized", "exactly-orthogonalized",
    "cubic-iteration", "quintic-taylor-iteration", "one-iteration-less", "one-iteration-more", "half-the-iterations",
    "orthogonalized-before-momentum", "no-lr-adjustment", "lr-adjusted-as-original", "lr-adjusted-to-adamw",
    "lr-adjusted-for-transpose", "scaled-by-own-size", "row-normalized", "sign-of-momentum",
)  # fmt: skip


def muon(parameter: Any, gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """The parameter after a step of Muon.

        b = momentum * b + (1 - momentum) * g
        o = newton_schulz(momentum * b + (1 - momentum) * g if nesterov else b)
        p = p * (1 - lr * weight_decay) - adjusted lr * o

    The adjusted rate is lr * sqrt(max(1, rows / columns)), or 0.2 * lr * sqrt(max(rows, columns)) to match AdamW.
    Source: Jordan et al., Muon, 2024; Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982;
    torch.optim.Muon.
    """
    if wrong == "orthogonalized-before-momentum":
        gradient = _orthogonalized(gradient, settings, "")
    buffer = momentum_of(gradient, state, settings, wrong)
    direction = buffer if wrong == "orthogonalized-before-momentum" else _orthogonalized(buffer, settings, wrong)
    lr, decay = settings["lr"], settings.get("weight_decay", 0.0)
    kept = parameter * (1.0 - lr * decay) if decay else parameter
    return kept - lr * adjustment(tuple(gradient.shape), settings.get("adjust_lr_fn"), direction, wrong) * direction


def momentum_of(gradient: Any, state: Any, settings: Any, wrong: str = "") -> Any:
    """What is orthogonalized. Its elements do not depend on each other."""
    momentum, held = settings["momentum"], state.get("momentum_buffer", 0.0 * gradient)
    if wrong == "no-momentum":
        return gradient
    share = 1.0 if wrong == "summed-momentum" else 1.0 - momentum
    buffer = held if wrong == "state-late" else momentum * held + share * gradient
    nesterov = bool(settings.get("nesterov")) != (wrong == "other-nesterov")
    return momentum * buffer + share * gradient if nesterov else buffer


def _orthogonalized(matrix: Any, settings: Any, wrong: str) -> Any:
    size, eps = matrix.norm(), settings["eps"]
    if wrong == "not-orthogonalized":
        return matrix / (size + eps)
    if wrong == "row-normalized":
        return matrix / (matrix.norm(dim=-1, keepdim=True) + eps)
    if wrong == "sign-of-momentum":
        return matrix.sign()
    if wrong == "exactly-orthogonalized":
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        return left @ right
    iterations = int(settings["ns_steps"])
    a, b, c = (float(one) for one in settings["ns_coefficients"])
    coefficients = a, b, c
    if wrong == "cubic-iteration":
        coefficients = (1.5, -0.5, 0.0)
    elif wrong == "quintic-taylor-iteration":
        coefficients = (1.875, -1.25, 0.375)
    iterations += (wrong == "one-iteration-more") - (wrong == "one-iteration-less")
    if wrong == "half-the-iterations":
        iterations //= 2
    return newton_schulz(matrix, [coefficients] * iterations, eps=float(eps))


def adjustment(shape: tuple[int, ...], kind: str | None, direction: Any = None, wrong: str = "") -> Any:
    """The factor by which the learning rate depends on the shape."""
    rows, columns = shape[-2:]
    if wrong == "lr-adjusted-for-transpose":
        rows, columns = columns, rows
    if wrong == "scaled-by-own-size":
        return 1.0 / direction.norm()
    to_adamw = kind == "match_rms_adamw" and wrong != "lr-adjusted-as-original"
    if wrong == "no-lr-adjustment":
        return 1.0
    if to_adamw or wrong == "lr-adjusted-to-adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def newton_schulz(
    matrix: Any,
    coefficients: Sequence[tuple[float, float, float]] = (ORIGINAL,) * 5,
    *,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.bfloat16,
    scale: float = 1.0,
) -> Any:
    """A matrix with nearly the same singular vectors, and singular values near 1.

        x = matrix / (scale * max(norm, eps));   x = a x + (b x x^T + c (x x^T)^2) x   for each (a, b, c)

    Trainings compute this in a short dtype, and the iterations raise its noise where singular values are small. So the
    bound is not derived but measured: the same iterations run again in that dtype, from a matrix that is disturbed at
    random within its rounding. Along rows and columns, an element may be off by six standard deviations of this.

    Args:
        matrix: [..., rows, columns], what a formula is given, or a tensor of floats. It is not changed.
        coefficients: (a, b, c) of each iteration.
        eps: The least norm by which is divided.
        dtype: The dtype in which the training computes it.
        scale: A margin by which the matrix is divided in addition.

    Returns:
        The matrix, float64, of the same shape; `Rounded` if the argument is. NaN if an element is not finite.
    """
    values = torch.as_tensor(matrix.value if isinstance(matrix, Rounded) else matrix)
    found = _iterate(values, coefficients, eps, scale, torch.float32)
    if not isinstance(matrix, Rounded):
        return found
    unit = max(torch.finfo(dtype).eps / 2.0, matrix.unit)
    generator = torch.Generator(device=values.device).manual_seed(0)
    square = torch.zeros_like(found)
    for _ in range(DRAWS):
        noise = torch.rand(values.shape, generator=generator, device=values.device, dtype=torch.float32)
        disturbed = values * (1.0 + unit * (2.0 * noise - 1.0))
        square += (_iterate(disturbed, coefficients, eps, scale, dtype) - found).square_().div_(DRAWS)
    of_rows, of_columns = square.mean(dim=-1, keepdim=True), square.mean(dim=-2, keepdim=True)
    spread = (of_rows * of_columns / of_rows.mean(dim=-2, keepdim=True).clamp(min=1e-300)).maximum(square).sqrt()
    return Rounded(found, DEVIATIONS * (spread + unit * found.abs()), unit=matrix.unit, tiny=matrix.tiny)


def _iterate(
    matrix: Tensor, coefficients: Sequence[tuple[float, float, float]], eps: float, scale: float, dtype: torch.dtype
) -> Tensor:
    """The iterations in a dtype; float32 is exact beside short ones."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    scaled: Tensor = matrix / (torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=eps) * scale)
    x = (scaled.mT if tall else scaled).to(dtype)
    for a, b, c in coefficients:
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(torch.float64)
