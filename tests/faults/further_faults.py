"""Further faults, to be found with measured floors: weaker ones, and in other places of the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.faults.injected import (
    AT,
    SINGLE,
    DroppedGpt,
    Fault,
    _flip_bit,
    _WrittenOut,
    after_backward,
    at,
    before_step,
    built,
    forward,
    gradient,
    setting,
)
from tests.faults.models import Attention, Block, Gpt, LstmClassifier
from tests.faults.recipe import Change, Moment, Recipe
from tests.faulty_step import at_end_of_step


def attention(
    *,
    scale: Callable[[Tensor], float] = lambda q: sqrt(q.shape[-1]),
    probabilities: Callable[[Tensor], Tensor] = lambda p: p,
    heads: Callable[[Tensor], Tensor] = lambda found: found,
) -> Callable[[Any, Tensor], Tensor]:
    """Attention with one of its parts changed."""

    def apply(self: Attention, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / scale(q)
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        found = heads(probabilities(scores.masked_fill(hidden, -torch.inf).softmax(-1)) @ v)
        return self.proj(found.transpose(1, 2).flatten(2))

    return apply


class _HalfGradient(torch.autograd.Function):
    """Gradients that pass through float16, without a loss scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.half().to(gradient.dtype)


class _TanhDerivative(torch.autograd.Function):
    """GELU with the derivative of its approximation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return functional.gelu(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(functional.gelu(x, approximate="tanh"), x, gradient)[0]


def _overflowing(self: nn.Linear, x: Tensor) -> Tensor:
    return (functional.linear(x, self.weight, self.bias) * 6e4).half().to(x.dtype) / 6e4


def _without_residual(self: Block, x: Tensor) -> Tensor:
    x = self.attn(self.ln1(x))
    return x + self.mlp(self.ln2(x))


def _detached_residual(self: Block, x: Tensor) -> Tensor:
    x = x + self.attn(self.ln1(x))
    return x + self.mlp(self.ln2(x.detach()))


def _variance_detached(self: nn.LayerNorm, x: Tensor) -> Tensor:
    variance = x.var(-1, keepdim=True, correction=0).detach()
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class _StaleWeight:
    """A layer that computes with the weights of the step before."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, now: Moment) -> None:
        module: Any = now.model.get_submodule(self._path)
        if now.step:
            stale = module.held
            module.forward = lambda x: functional.linear(x, stale + 0 * module.weight, module.bias)
        module.held = module.weight.detach().clone()


def _zero_row(found: Tensor) -> Tensor:
    found = found.clone()
    found[7] = 0
    return found


def _noisy(found: Tensor) -> Tensor:
    noise = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    return found * (1 + 1e-3 * noise.to(found.dtype))


def _clip_by_value(now: Moment) -> None:
    nn.utils.clip_grad_value_(now.model.parameters(), 0.01)


def _clip_to_norm_of_matrices(now: Moment) -> None:
    matrices = [p for p in now.model.parameters() if p.dim() > 1]
    whole = torch.stack([p.grad.norm() for p in matrices]).norm()
    for parameter in now.model.parameters():
        parameter.grad.mul_(0.05 / (whole + 1e-6))


class _EpsilonInside(_WrittenOut):
    epsilon_inside = True


def _rounded_updates(path: str) -> Callable[[Recipe], Recipe]:
    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        parameter = model.get_parameter(path)

        def swallow(*_: Any) -> None:
            with torch.no_grad():
                parameter.copy_(parameter.bfloat16())

        at_end_of_step(optimizer, swallow)
        return optimizer

    return lambda recipe: recipe.but(optimizer=build)


def _optimizer_with_a_stale_head(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    head: Any = model.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())
    return optimizer


def _untied() -> nn.Module:
    model = Gpt(tied=True)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return model


def _freeze_fc(model: nn.Module) -> None:
    model.get_parameter("h.0.mlp.fc.weight").requires_grad_(requires_grad=False)


def _same_augmentation(recipe: Recipe) -> Recipe:
    def batch(data: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, labels = recipe.batch(data)
        return inputs.repeat_interleave(2, 0)[: len(inputs)], labels.repeat_interleave(2, 0)[: len(labels)]

    return recipe.but(batch=batch)


def _evaluate(*, dropout: bool) -> Change:
    def change(now: Moment) -> None:
        now.model.train(dropout)
        with torch.no_grad():
            now.model(now.inputs)
        now.model.train()

    return change


def _ignoring(label: int, *, divide_by_all: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        flat = labels.flatten()
        total = functional.cross_entropy(logits.float().flatten(0, -2), flat, ignore_index=label, reduction="sum")
        return total / (flat.numel() if divide_by_all else (flat != label).sum())

    return loss


_MASKED_LOSS = _ignoring(7, divide_by_all=False)
_MASKED_LOSS_OVER_ALL = _ignoring(7, divide_by_all=True)


def _smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), label_smoothing=0.01)


def _halves(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
    return torch.cat([functional.batch_norm(half, None, None, self.weight, self.bias, True) for half in x.chunk(2)])


def _biased_variance(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.running_mean.lerp_(x.mean((0, 2, 3)), 0.1)
        self.running_var.lerp_(x.var((0, 2, 3), correction=0), 0.1)
        self.num_batches_tracked += 1
    return functional.batch_norm(x, None, None, self.weight, self.bias, True)


def _carried_state(self: nn.LSTM, x: Tensor) -> Any:
    states, last = nn.LSTM.forward(self, x, self.__dict__.get("held"))
    self.__dict__["held"] = tuple(one.detach() for one in last)
    return states, last


def _last_but_one(self: LstmClassifier, tokens: Tensor) -> Tensor:
    states, _ = self.lstm(self.embed(tokens))
    return self.head(states[:, -2])


def _largest_for_mean(self: Any, x: Tensor) -> Tensor:
    x = functional.relu(self.bn1(self.conv1(x)))
    x = functional.relu(self.bn2(self.conv2(x)))
    return self.head(x.amax((2, 3)))


def _conv(fault: Fault) -> Fault:
    return replace(fault, model="conv", optimizer="sgd")


def _lstm(fault: Fault) -> Fault:
    return replace(fault, model="lstm", optimizer="adam")


def _adamw_of(kind: type[torch.optim.Optimizer]) -> Callable[[Recipe], Recipe]:
    return lambda recipe: recipe.but(optimizer=lambda model: kind(model.parameters(), lr=3e-3, weight_decay=0.1))


FURTHER_FAULTS: dict[str, Fault] = {
    # -- of the list: loss and accumulation, randomness, precision, optimizer, hardware
    "accumulation-corrected-twice": Fault(
        change=lambda recipe: recipe.but(weigh=lambda number, sizes: sizes[number] / sum(sizes) / len(sizes)), step=0,
        phase="loss", path="loss", kind="scale", base={"micro_batches": (4, 4)},
    ),
    "mean-over-padding": Fault(
        change=lambda recipe: recipe.but(loss=_MASKED_LOSS_OVER_ALL), step=0, phase="loss", path="loss",
        base={"loss": _MASKED_LOSS},
    ),
    "same-augmentation-in-every-worker": Fault(
        change=_same_augmentation, step=0, phase="batch", path="", kind="batch", word="misaligned",
    ),
    "dropout-on-in-evaluation": Fault(
        change=lambda recipe: recipe.but(after_step=_evaluate(dropout=True)), step=1, phase="batch", path="rng",
        kind="random-state", word="misaligned", base={"build": DroppedGpt, "after_step": _evaluate(dropout=False)},
    ),
    "gradients-through-float16": Fault(
        change=built(forward("h.0.mlp.act", lambda self, x: _HalfGradient.apply(functional.gelu(x)))), step=0,
        phase="backward", path="h.0.mlp.fc",
    ),
    "overflow-in-float16": Fault(
        change=before_step(at(AT, lambda now: forward("h.1.mlp.fc", _overflowing)(now.model))), step=AT,
        phase="forward", path="h.1.mlp.fc", kind="non-finite",
    ),
    "updates-swallowed": Fault(
        change=_rounded_updates("h.0.mlp.fc.weight"), step=0, phase="update", path="h.0.mlp.fc.weight",
        precisions=("float32", "autocast"),
    ),
    "frozen-part-trains": Fault(
        change=lambda recipe: recipe.but(prepare=lambda model: None), step=0, phase="grad",
        path="h.0.mlp.fc.weight", kind="extra", base={"prepare": _freeze_fc},
    ),
    "optimizer-holds-stale-parameter": Fault(
        change=lambda recipe: recipe.but(optimizer=_optimizer_with_a_stale_head), step=0, phase="grad",
        path="head.weight", kind="missing",
    ),
    "bit-flipped-in-a-norm": Fault(
        change=before_step(at(AT, _flip_bit("h.1.ln1.weight", 27))), step=AT, phase="param", path="h.1.ln1.weight",
    ),
    # -- of our own
    "softmax-in-bfloat16": Fault(
        change=built(forward("h.0.attn", attention(probabilities=lambda p: p.bfloat16().to(p.dtype)))), step=0,
        phase="forward", path="h.0.attn.proj", precisions=SINGLE,
    ),
    "attention-scaled-by-width": Fault(
        change=built(forward("h.0.attn", attention(scale=lambda q: sqrt(32)))), step=0, phase="forward",
        path="h.0.attn.proj",
    ),
    "heads-swapped": Fault(
        change=built(forward("h.1.attn", attention(heads=lambda found: found.flip(1)))), step=0, phase="forward",
        path="h.1.attn.proj",
    ),
    "residual-lost": Fault(
        change=built(forward("h.1", _without_residual)), step=0, phase="forward", path="h.1.ln2",
    ),
    "residual-detached": Fault(
        change=built(forward("h.1", _detached_residual)), step=0, phase="backward", path="h.1.attn.proj",
    ),
    "wrong-derivative": Fault(
        change=built(forward("h.0.mlp.act", lambda self, x: _TanhDerivative.apply(x))), step=0, phase="backward",
        path="h.0.mlp.fc", precisions=SINGLE,
    ),
    "norm-variance-detached": Fault(
        change=built(forward("h.1.ln2", _variance_detached)), step=0, phase="backward", path="h.1.attn.proj",
    ),
    "stale-weight": Fault(
        change=before_step(_StaleWeight("h.1.mlp.fc")), step=1, phase="forward", path="h.1.mlp.fc",
    ),
    "label-smoothing": Fault(
        change=lambda recipe: recipe.but(loss=_smoothed), step=0, phase="loss", path="loss",
    ),
    "one-token-untrained": Fault(
        change=after_backward(gradient("wte.weight", _zero_row)), step=0, phase="grad", path="wte.weight",
        kind="localized",
    ),
    "gradient-noise": Fault(
        change=after_backward(gradient("h.1.attn.q.weight", _noisy)), step=0, phase="grad", path="h.1.attn.q.weight",
        precisions=SINGLE,
    ),
    "clipped-by-value": Fault(
        change=lambda recipe: recipe.but(clip=None, after_backward=_clip_by_value), step=0, phase="grad",
        path="(all parameters)", kind="clipping", message="The baseline clips gradients to a norm of 0.05",
        base={"clip": 0.05},
    ),
    "clipped-to-the-norm-of-a-part": Fault(
        change=lambda recipe: recipe.but(clip=None, after_backward=_clip_to_norm_of_matrices), step=0, phase="grad",
        path="(all parameters)", base={"clip": 0.05},
    ),
    "epsilon-inside-the-root": Fault(
        change=_adamw_of(_EpsilonInside), step=0, phase="update", path="wte.weight",
    ),
    "decay-as-l2": Fault(
        change=_adamw_of(torch.optim.Adam), step=0, phase="optimizer", path="optimizer.groups[0]",
        kind="hyper-parameter", word="misaligned",
    ),
    "tie-broken": Fault(
        change=lambda recipe: recipe.but(build=_untied), step=0, phase="grad", path="wte.weight",
        base={"build": lambda: Gpt(tied=True)},
    ),
    "padding-reflects": _conv(Fault(
        change=built(setting("conv1", "padding_mode", "reflect")), step=0, phase="forward", path="conv1",
    )),
    "colors-reversed": _conv(Fault(
        change=built(forward("conv1", lambda self, x: self._conv_forward(x.flip(1), self.weight, self.bias))), step=0,
        phase="forward", path="conv1",
    )),
    "batch-norm-eps": _conv(Fault(
        change=built(setting("bn2", "eps", 1e-3)), step=0, phase="forward", path="bn2", precisions=SINGLE,
    )),
    "batch-norm-of-halves": _conv(Fault(
        change=built(forward("bn1", _halves)), step=0, phase="forward", path="bn1",
    )),
    "running-variance-biased": _conv(Fault(
        change=built(forward("bn2", _biased_variance)), step=0, phase="param", path="bn2.running_var",
        precisions=SINGLE,
    )),
    "largest-for-mean": _conv(Fault(
        change=built(forward("", _largest_for_mean)), step=0, phase="forward", path="head",
    )),
    "nesterov": _conv(Fault(
        change=lambda recipe: recipe.but(
            optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
        ),
        step=0, phase="optimizer", path="optimizer.groups[0]", kind="hyper-parameter", word="misaligned",
    )),
    "sequence-reversed": _lstm(Fault(
        change=built(forward("lstm", lambda self, x: nn.LSTM.forward(self, x.flip(1)))), step=0, phase="forward",
        path="lstm",
    )),
    "state-carried-over": _lstm(Fault(
        change=built(forward("lstm", _carried_state)), step=1, phase="forward",
        path="lstm",
    )),
    "last-but-one-state": _lstm(Fault(
        change=built(forward("", _last_but_one)), step=0, phase="forward", path="head",
    )),
}  # fmt: skip
