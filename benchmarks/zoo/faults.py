"""Faults: changes of a training that make it wrong, each with its place and its cause."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import torch
from benchmarks.zoo.legal import is_cuttable
from benchmarks.zoo.recipe import Batch, Change, Now, Recipe, nothing, zero_grad
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

AT = 2
"""The step in which faults happen that last one step."""

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.InstanceNorm2d)
ACTIVATIONS = (nn.GELU, nn.SiLU, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.Tanh, nn.Softplus)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a fault is.

    Attributes:
        steps: Steps in which it may be named first.
        phases: Phases in which it may be named first.
        path: Canonical path of the module or parameter; None for any.
        words: A pattern that a sentence of the verdict matches if it names the cause.
    """

    steps: tuple[int, ...]
    phases: tuple[str, ...]
    path: str | None
    words: str

    def located(self, step: int, phase: str, path: str) -> bool:
        """Whether a first divergence is at this place."""
        return step in self.steps and phase in self.phases and self.path in (None, path)

    def explained(self, text: str) -> bool:
        """Whether a text names the cause."""
        return re.search(self.words, text, re.IGNORECASE) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault of one training.

    Attributes:
        change: Makes the wrong training.
        place: Where it is.
        base: Makes the baseline from the training as it is, for faults of micro-batches.
    """

    change: Callable[[Recipe], Recipe]
    place: Place
    base: Callable[[Recipe], Recipe] = lambda recipe: recipe


Finder = Callable[[Recipe, nn.Module], Fault | None]


def middle(model: nn.Module, *kinds: type[nn.Module], trained: bool = True) -> tuple[str, nn.Module] | None:
    """Path and module in the middle of those of some classes; only trained ones where asked."""
    found = [
        (path, module)
        for path, module in model.named_modules()
        if type(module) in kinds
        and not path.startswith(("average", "teacher"))
        and (not trained or any(one.requires_grad for one in module.parameters(recurse=False)))
    ]
    return found[len(found) // 2] if found else None


def middle_weight(model: nn.Module) -> str:
    """Name of a trained matrix in the middle of the model."""
    found = [
        name
        for name, one in model.named_parameters()
        if one.requires_grad
        and one.dim() >= 2
        and one.numel() >= 16
        and "original0" not in name
        and not name.startswith(("average", "teacher"))
    ]
    return found[len(found) // 2]


def at(step: int, change: Change) -> Change:
    """The change, in one step only."""

    def only_then(now: Now) -> None:
        if now.step == step:
            change(now)

    return only_then


def changed_forward(path: str, new: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[Recipe], Recipe]:
    """A module with another forward, whose name tells nothing."""
    new.__qualname__ = "other_forward"

    def prepare(model: nn.Module) -> None:
        module = model.get_submodule(path)
        module.forward = partial(new, module)

    return lambda recipe: recipe.but(prepare=prepare)


def norm_eps(_: Recipe, model: nn.Module) -> Fault | None:
    """Another eps in one norm."""
    found = middle(model, *NORMS)
    if found is None:
        return None
    path = found[0]

    def prepare(model: nn.Module) -> None:
        norm: Any = model.get_submodule(path)
        norm.eps = 0.02

    place = Place(steps=(0,), phases=("forward",), path=path, words=r"\beps\b")
    return Fault(change=lambda recipe: recipe.but(prepare=prepare), place=place)


def activation(recipe: Recipe, model: nn.Module) -> Fault | None:
    """Another activation in one place; the approximation of GELU is far below one rounding of a short dtype."""
    found = middle(model, *ACTIVATIONS, trained=False)
    if found is None:
        return None
    path, module = found
    approximates = isinstance(module, nn.GELU) and recipe.precision == "float32"
    new: nn.Module = nn.GELU("tanh") if approximates else nn.Mish()
    words = "approximate|tanh" if approximates else "Mish"
    place = Place(steps=(0,), phases=("forward",), path=path, words=words)
    return Fault(change=lambda recipe: recipe.but(prepare=lambda model: model.set_submodule(path, new)), place=place)


def bias_lost(_: Recipe, model: nn.Module) -> Fault | None:
    """A linear layer or a convolution that forgets its bias."""
    kinds = (nn.Linear, nn.Conv2d, nn.Conv1d)
    named = [
        path
        for path, module in model.named_modules()
        if type(module) in kinds and module.bias is not None and not path.startswith(("average", "teacher"))
        and not path.endswith("out_proj")
    ]  # fmt: skip
    if not named:
        return None
    path = named[len(named) // 2]

    def new(module: Any, x: Tensor) -> Tensor:
        if isinstance(module, nn.Linear):
            return functional.linear(x, module.weight)
        return module._conv_forward(x, module.weight, None)

    return Fault(
        change=changed_forward(path, new), place=Place(steps=(0,), phases=("forward",), path=path, words="bias")
    )


def low_precision(recipe: Recipe, model: nn.Module) -> Fault | None:
    """One linear layer computes in bfloat16."""
    found = middle(model, nn.Linear, trained=False)
    if found is None or recipe.precision != "float32":
        return None
    path = found[0]

    def new(module: Any, x: Tensor) -> Tensor:
        bias = None if module.bias is None else module.bias.bfloat16()
        return functional.linear(x.bfloat16(), module.weight.bfloat16(), bias).to(x.dtype)

    place = Place(steps=(0,), phases=("forward",), path=path, words="bfloat16|bf16|forward was replaced")
    return Fault(change=changed_forward(path, new), place=place)


def row_lost(_: Recipe, model: nn.Module) -> Fault | None:
    """A layer returns zeros for one sample."""
    found = middle(model, nn.Linear, nn.Conv2d, nn.Conv1d, trained=False)
    if found is None:
        return None
    path, kind = found[0], type(found[1])

    def new(module: Any, x: Tensor) -> Tensor:
        y: Tensor = kind.forward(module, x)
        kept = torch.ones(len(y), *(1 for _ in y.shape[1:]), dtype=y.dtype)
        kept[1] = 0
        return y * kept

    return Fault(
        change=changed_forward(path, new), place=Place(steps=(0,), phases=("forward",), path=path, words=r"row|zero")
    )


def gradient(change: Callable[[Tensor], Tensor], words: str) -> Finder:
    """One gradient is changed in one step."""

    def find(recipe: Recipe, model: nn.Module) -> Fault | None:
        path = middle_weight(model)
        if recipe.name == "gan" and path.startswith("generator"):
            path = "discriminator.0.weight"

        def apply(now: Now) -> None:
            parameter = now.model.get_parameter(path)
            assert parameter.grad is not None
            parameter.grad.copy_(change(parameter.grad))

        place = Place(steps=(AT,), phases=("grad",), path=path, words=words)
        return Fault(change=lambda recipe: recipe.but(after_backward=at(AT, apply)), place=place)

    return find


def stray_write(recipe: Recipe, model: nn.Module) -> Fault | None:
    """Something else than the optimizer changes a weight between two steps."""
    if recipe.steps <= AT + 1:  # the next step shows it
        return None
    path = middle_weight(model)

    def apply(now: Now) -> None:
        with torch.no_grad():
            now.model.get_parameter(path).view(-1)[3].add_(0.5)

    place = Place(steps=(AT + 1,), phases=("param",), path=path, words="not by the optimizer")
    return Fault(change=lambda recipe: recipe.but(after_step=at(AT, apply)), place=place)


def zero_grad_lost(recipe: Recipe, _: nn.Module) -> Fault | None:
    """The gradients of one step are not forgotten."""
    if recipe.name in ("lbfgs", "sam", "gan"):
        return None
    place = Place(steps=(AT,), phases=("grad",), path=None, words="zero_grad|step before")
    changed: Change = lambda now: nothing(now) if now.step == AT - 1 else zero_grad(now)  # noqa: E731
    return Fault(change=lambda recipe: recipe.but(zero_grad=changed), place=place)


def micro_batch_lost(recipe: Recipe, model: nn.Module) -> Fault | None:
    """One of four micro-batches of one step is not computed."""
    if not is_cuttable(recipe, model) or recipe.name == "lbfgs":
        return None
    place = Place(steps=(AT,), phases=("grad", "forward", "loss", "batch"), path=None, words="micro-")
    return Fault(
        change=lambda recipe: recipe.but(lost=frozenset({(AT, 2)})), place=place,
        base=lambda recipe: recipe.but(micro_batches=(0.25, 0.25, 0.25, 0.25)),
    )  # fmt: skip


def stale_gradient(recipe: Recipe, model: nn.Module) -> Fault | None:
    """One gradient is that of the step before."""
    path = middle_weight(model)
    if recipe.name == "gan" and path.startswith("generator"):
        path = "discriminator.0.weight"
    held: dict[str, Tensor] = {}

    def apply(now: Now) -> None:
        parameter = now.model.get_parameter(path)
        if parameter.grad is None:  # not trained in every step
            return
        fresh = parameter.grad.clone()
        if now.step == AT:
            parameter.grad.copy_(held["before"])
        held["before"] = fresh

    if recipe.name == "lbfgs":
        return None
    place = Place(steps=(AT,), phases=("grad",), path=path, words="step before|previous step|stale")
    return Fault(change=lambda recipe: recipe.but(after_backward=apply), place=place)


def frozen(recipe: Recipe, model: nn.Module) -> Fault | None:
    """One weight is not trained."""
    if recipe.name in ("averaging", "gan"):  # a deep copy has it, and the penalty needs it
        return None
    path = middle_weight(model)
    if parametrize.is_parametrized(model.get_submodule(path.rpartition(".parametrizations")[0] or "")):
        return None
    place = Place(steps=(0,), phases=("grad", "update"), path=path, words="frozen|requires_grad|not trained")

    def prepare(model: nn.Module) -> None:
        model.get_parameter(path).requires_grad_(False)

    return Fault(change=lambda recipe: recipe.but(prepare=prepare), place=place)


def learning_rate(recipe: Recipe, _: nn.Module) -> Fault | None:
    """The learning rate is a tenth larger from a step on."""
    plain = recipe.schedule or (lambda step: 1.0)
    place = Place(steps=(AT,), phases=("optimizer", "update"), path=None, words=r"learning rate|\blr\b")
    return Fault(
        change=lambda recipe: recipe.but(schedule=lambda step: plain(step) * (1.1 if step >= AT else 1.0)), place=place
    )


def optimizer_setting(recipe: Recipe, model: nn.Module) -> Fault | None:
    """Another momentum, beta or decay."""
    found = recipe.optimizer(model)
    group = (next(iter(found.values())) if isinstance(found, dict) else found).param_groups[0]
    name, value = next(
        ((name, value) for name, value in (("betas", (0.8, 0.9)), ("momentum", 0.8), ("alpha", 0.9)) if name in group),
        ("", None),
    )
    if recipe.name in ("lbfgs",) or not name or group[name] == 0:
        return None

    def build(model: nn.Module) -> Any:
        made = recipe.optimizer(model)
        for optimizer in made.values() if isinstance(made, dict) else [made]:
            for one in optimizer.param_groups:
                one[name] = value
        return made

    words = {"betas": "beta", "momentum": "momentum", "alpha": "alpha"}[name]
    place = Place(steps=(0, 1), phases=("optimizer", "update"), path=None, words=words)
    return Fault(change=lambda recipe: recipe.but(optimizer=build), place=place)


def clip_lost(recipe: Recipe, _: nn.Module) -> Fault | None:
    """Gradients are clipped to another norm."""
    if recipe.clip == inf:
        return None
    place = Place(steps=(0,), phases=("grad",), path=None, words="clip")
    return Fault(change=lambda recipe: recipe.but(clip=0.02), place=place, base=lambda recipe: recipe.but(clip=0.05))


def evaluation_mode(recipe: Recipe, model: nn.Module) -> Fault | None:
    """Dropout, stochastic depth or BatchNorm in evaluation mode from a step on."""
    kinds = (nn.Dropout, nn.BatchNorm1d, nn.BatchNorm2d)
    named = [
        path for path, module in model.named_modules()
        if type(module) in kinds and getattr(module, "p", 1.0) and not path.startswith(("average", "teacher"))
    ]  # fmt: skip
    if not named:
        return None
    path = named[len(named) // 2]

    def begin(now: Now) -> None:
        if now.step == AT:
            now.model.get_submodule(path).eval()

    place = Place(steps=(AT,), phases=("forward",), path=path, words=r"evaluation|eval\(\)|training")
    return Fault(change=lambda recipe: recipe.but(begin=begin), place=place)


def wrong_batch(recipe: Recipe, _: nn.Module) -> Fault | None:
    """The samples of one step are scaled, or shifted by one token."""

    def begin(now: Now) -> None:
        if now.step == AT:
            now.batch = {
                name: one * 1.01 if one.is_floating_point() else (one.roll(1, -1) if "tokens" in name else one)
                for name, one in now.batch.items()
            }

    if recipe.name == "t5":
        return None
    place = Place(
        steps=(AT,), phases=("batch", "forward", "loss"), path=None, words="misaligned|not the same|batch|input"
    )
    return Fault(change=lambda recipe: recipe.but(begin=begin), place=place)


def scaled_loss(recipe: Recipe, _: nn.Module) -> Fault | None:
    """The loss is twice what it should be."""
    if recipe.name in ("gan",):
        return None
    plain = recipe.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return plain(model, batch) * 2

    place = Place(steps=(0,), phases=("loss", "backward", "grad"), path=None, words=r"\b2(\.0+)? ?x|twice|factor")
    return Fault(change=lambda recipe: recipe.but(loss=loss), place=place)


def branch_detached(recipe: Recipe, model: nn.Module) -> Fault | None:
    """No gradient flows back through one module."""
    found = middle(model, nn.Linear, nn.Conv2d, trained=True)
    if found is None or recipe.name in ("gradient-penalty", "temporal"):
        return None
    path, kind = found[0], type(found[1])

    def new(module: Any, x: Tensor) -> Tensor:
        y: Tensor = kind.forward(module, x.detach())
        return y

    place = Place(steps=(0,), phases=("backward", "grad"), path=None, words="gradient|detach|no gradient")
    return Fault(change=changed_forward(path, new), place=place)


FAULTS: dict[str, Finder] = {
    "norm-eps": norm_eps,
    "activation": activation,
    "bias-lost": bias_lost,
    "low-precision": low_precision,
    "row-lost": row_lost,
    "gradient-doubled": gradient(lambda one: one * 2, r"\b2(\.0+)? ?x|twice|factor"),
    "gradient-row-zero": gradient(
        lambda one: torch.cat([torch.zeros_like(one[:1]), one[1:]]), r"\brow|zero"
    ),
    "gradient-negated": gradient(lambda one: -one, r"sign|-1"),
    "stray-write": stray_write,
    "zero-grad-lost": zero_grad_lost,
    "micro-batch-lost": micro_batch_lost,
    "stale-gradient": stale_gradient,
    "frozen": frozen,
    "learning-rate": learning_rate,
    "optimizer-setting": optimizer_setting,
    "clip": clip_lost,
    "evaluation-mode": evaluation_mode,
    "wrong-batch": wrong_batch,
    "scaled-loss": scaled_loss,
    "branch-detached": branch_detached,
}  # fmt: skip
"""By name: a fault of a training, or None where it does not apply."""


def faults(recipe: Recipe) -> dict[str, Fault]:
    """The faults that a training may have, by name."""
    model = recipe.build()
    found = {name: find(recipe, model) for name, find in FAULTS.items()}
    return {name: fault for name, fault in found.items() if fault is not None}
