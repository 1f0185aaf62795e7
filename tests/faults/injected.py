"""Faults: wrong trainings, each with the place where it must be found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.faults.models import VOCABULARY, Attention, Block, Gpt
from tests.faults.recipe import Change, Moment, Recipe, mean_cross_entropy, recipe
from tests.faults.variations import replace_forward
from tests.faulty_step import at_end_of_step

AT = 3
"""Step of the faults that happen in the middle of a run."""

Dtypes = tuple[str, ...]
SINGLE = ("float32",)
ALL = ("float32", "autocast", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        change: Makes the wrong recipe from the right one.
        step: Step of the first divergence.
        phase: Its phase; several where it may show in either.
        path: Its path.
        kind: What the diagnosis calls it; empty for any.
        word: Verdict.
        model: Model that is trained.
        optimizer: With which optimizer.
        precisions: In which it has an effect above rounding.
        base: Changes to the recipe of both runs.
        message: What the sentence must hold.
    """

    change: Callable[[Recipe], Recipe]
    step: int
    phase: str
    path: str
    kind: str = ""
    word: str = "diverged"
    model: str = "gpt"
    optimizer: str = "adamw"
    precisions: Dtypes = ALL
    base: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def place(self) -> tuple[int, str, str]:
        """Step, phase and path of the first divergence."""
        return self.step, self.phase, self.path

    def baseline(self, precision: str) -> Recipe:
        return recipe(self.model, self.optimizer, precision).but(steps=6, **self.base)  # type: ignore[arg-type]


def at(step: int, change: Change) -> Change:
    """The change, in one step only."""

    def only_then(now: Moment) -> None:
        if now.step == step:
            change(now)

    return only_then


def after_backward(change: Change) -> Callable[[Recipe], Recipe]:
    return lambda recipe: recipe.but(after_backward=change)


def before_step(change: Change) -> Callable[[Recipe], Recipe]:
    return lambda recipe: recipe.but(before_step=change)


def prepared(change: Callable[[nn.Module], None]) -> Callable[[Recipe], Recipe]:
    return lambda recipe: recipe.but(prepare=change)


def built(change: Callable[[nn.Module], None]) -> Callable[[Recipe], Recipe]:
    """The change, made to the model after it was recorded as built: from the first step on."""
    return before_step(at(0, lambda now: change(now.model)))


def gradient(path: str, change: Callable[[Tensor], Tensor]) -> Change:
    def apply(now: Moment) -> None:
        parameter = now.model.get_parameter(path)
        parameter.grad = change(parameter.grad)

    return apply


def all_gradients(factor: float) -> Change:
    def apply(now: Moment) -> None:
        for parameter in now.model.parameters():
            parameter.grad *= factor

    return apply


def forward(path: str, new: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        module = model.get_submodule(path)
        module.forward = new.__get__(module)

    return apply


def setting(path: str, name: str, value: Any) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        module = model.get_submodule(path)
        assert hasattr(module, name)
        setattr(module, name, value)

    return apply


def _one_row_wrong(found: Tensor) -> Tensor:
    found = found.clone()
    found[5] *= 3.0
    return found


def _not_a_number(now: Moment) -> None:
    def once(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        handle.remove()
        output = output.clone()
        output.view(-1)[7] = torch.nan
        return output

    # In front of the hook that records, so that it sees what the next layer sees.
    handle = now.model.get_submodule("h.1.mlp.fc").register_forward_hook(once, prepend=True)


class _Late:
    """Gradients that arrive one step late, for one parameter."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._held: Tensor | None = None

    def __call__(self, now: Moment) -> None:
        parameter = now.model.get_parameter(self._path)
        fresh = parameter.grad.clone()
        if now.step == 0:
            self._held = None  # the same recipe, run again
        if self._held is not None:
            parameter.grad = self._held
        self._held = fresh


def _skip_update(path: str) -> Callable[[Recipe], Recipe]:
    """A kernel that writes to a temporary: the parameter never moves."""

    def build(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        parameter = model.get_parameter(path)
        before = parameter.detach().clone()

        def put_back(*_: Any) -> None:
            with torch.no_grad():
                parameter.copy_(before)

        at_end_of_step(optimizer, put_back)
        return optimizer

    return lambda recipe: recipe.but(optimizer=build)


class _WrittenOut(torch.optim.AdamW):
    """AdamW written out, without one of its parts."""

    corrects_bias = True
    decays = True
    epsilon_inside = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                step = state["step"].item() if self.corrects_bias else torch.inf
                if self.decays:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                outside, inside = (0.0, group["eps"]) if self.epsilon_inside else (group["eps"], 0.0)
                size = ((state["exp_avg_sq"] + inside).sqrt() / sqrt(1 - beta2**step)).add_(outside)
                p.addcdiv_(state["exp_avg"], size, value=-group["lr"] / (1 - beta1**step))


class _NoBiasCorrection(_WrittenOut):
    corrects_bias = False


class _NoDecay(_WrittenOut):
    decays = False


def adamw(**options: Any) -> Callable[[Recipe], Recipe]:
    settings = {"lr": 3e-3, "weight_decay": 0.1, **options}
    return lambda recipe: recipe.but(optimizer=lambda model: torch.optim.AdamW(model.parameters(), **settings))


def _groups(model: nn.Module, *, decay_biases: bool) -> torch.optim.Optimizer:
    plain = [p for p in model.parameters() if p.dim() > 1]
    flat = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": plain}, {"params": flat, "weight_decay": 0.1 if decay_biases else 0.0}]
    return torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)


def _permute_heads(model: nn.Module) -> None:
    """The order of a head's rows in which another checkpoint format keeps a query projection."""
    weight = model.get_parameter("h.0.attn.q.weight")
    with torch.no_grad():
        weight.copy_(weight.view(2, 2, 8, -1).transpose(1, 2).reshape(weight.shape))


def _flip_bit(path: str, bit: int) -> Change:
    def apply(now: Moment) -> None:
        with torch.no_grad():
            flat = now.model.get_parameter(path).view(-1)
            wide = torch.int32 if flat.dtype == torch.float32 else torch.int16
            flat.view(wide)[11] ^= 1 << (bit if flat.dtype == torch.float32 else bit - 16)

    return apply


def _bfloat16_sum(self: nn.LayerNorm, x: Tensor) -> Tensor:
    mean = x.bfloat16().mean(-1, keepdim=True).to(x.dtype)
    variance = x.var(-1, keepdim=True, correction=0)
    return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


def _bfloat16_residual(self: Block, x: Tensor) -> Tensor:
    x = (x + self.attn(self.ln1(x))).bfloat16().to(x.dtype)
    return x + self.mlp(self.ln2(x))


def _lost_head(self: nn.Linear, x: Tensor) -> Tensor:
    return functional.linear(x, self.weight.detach())


def _other_mask(model: nn.Module) -> None:
    """Activation checkpointing that does not restore the random state: another dropout mask."""
    plain = type(model.get_submodule("mlp")).forward

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(plain.__get__(self), x, use_reentrant=False, preserve_rng_state=False)

    model.get_submodule("mlp").forward = forward.__get__(model.get_submodule("mlp"))


class DroppedGpt(nn.Module):
    """One feed-forward layer with dropout, small enough to recompute."""

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(16, 32)
            self.drop = nn.Dropout(0.5)
            self.proj = nn.Linear(32, 16)
            self.last = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.proj(self.drop(self.fc(x))))

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mlp = self.FeedForward()
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.mlp(self.embed(tokens)))


def _unnormalized(self: Attention, x: Tensor) -> Tensor:
    q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
    scores = q @ k.transpose(-2, -1) / sqrt(q.shape[-1] + 1)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return self.proj((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2))


def _shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return mean_cross_entropy(logits[:, :-1], labels[:, 1:])


def _tied() -> nn.Module:
    return Gpt(tied=True)


def _freeze(now: Moment) -> None:
    now.model.get_parameter("h.0.mlp.fc.weight").requires_grad_(requires_grad=False)


def _forget_moments(now: Moment) -> None:
    now.optimizer.state.clear()


def _never_zero(now: Moment) -> None:
    pass


FAULTS: dict[str, Fault] = {
    # -- gradients
    "all-gradients-doubled": Fault(
        change=after_backward(all_gradients(2.0)), step=0, phase="grad", path="wte.weight", kind="scale",
        message="All gradients are 2 x the baseline's.",
    ),
    "gradient-doubled": Fault(
        change=after_backward(gradient("h.1.attn.v.weight", lambda g: g * 2)), step=0, phase="grad",
        path="h.1.attn.v.weight", kind="scale",
    ),
    "gradient-halved-once": Fault(
        change=after_backward(at(AT, gradient("h.0.mlp.fc.weight", lambda g: g / 2))), step=AT, phase="grad",
        path="h.0.mlp.fc.weight", kind="scale", message="0.5 x the baseline's (= 1/2)",
    ),
    "gradient-doubled-under-clipping": Fault(
        change=after_backward(gradient("h.1.attn.v.weight", lambda g: g * 2)), step=0, phase="grad",
        path="h.1.attn.v.weight", base={"clip": 0.1},
    ),
    "sign-flipped": Fault(
        change=after_backward(gradient("h.0.attn.proj.weight", torch.neg)), step=0, phase="grad",
        path="h.0.attn.proj.weight", kind="sign",
    ),
    "one-row-corrupted": Fault(
        change=after_backward(gradient("h.1.mlp.fc.weight", _one_row_wrong)), step=0, phase="grad",
        path="h.1.mlp.fc.weight", kind="localized", message="rows 0 to 7 (of 128)",
    ),
    "gradient-one-step-late": Fault(
        change=lambda recipe: recipe.but(after_backward=_Late("h.0.attn.v.weight")), step=1, phase="grad",
        path="h.0.attn.v.weight", kind="late", message="what the baseline has in the step before: one step late?",
    ),
    "gradient-lost": Fault(
        change=after_backward(gradient("ln_f.bias", torch.zeros_like)), step=0, phase="grad", path="ln_f.bias",
        kind="zero",
    ),
    "zero-grad-missing": Fault(
        change=lambda recipe: recipe.but(zero_grad=_never_zero), step=1, phase="grad", path="wte.weight",
    ),
    "not-clipped": Fault(
        change=lambda recipe: recipe.but(clip=None), step=0, phase="grad", path="(all parameters)", kind="clipping",
        message="The baseline clips gradients to a norm of 0.05; the candidate does not clip", base={"clip": 0.05},
    ),
    # -- tying, initialization, checkpoints
    "tied-head-detached": Fault(
        change=built(forward("head", _lost_head)), step=0, phase="grad", path="wte.weight", base={"build": _tied},
    ),
    "moments-forgotten": Fault(
        change=before_step(at(AT, _forget_moments)), step=AT, phase="optimizer", path="wte.weight",
        kind="step-count",
    ),
    "weights-permuted": Fault(
        change=prepared(_permute_heads), step=0, phase="param", path="h.0.attn.q.weight", kind="initial-parameter",
        word="misaligned", message="the same values in another order",
    ),
    "other-seed": Fault(
        change=lambda recipe: recipe.but(seed=1), step=0, phase="param", path="wte.weight", kind="initial-parameter",
        word="misaligned",
    ),
    "other-seed-and-precision": Fault(
        change=lambda recipe: recipe.but(seed=1, precision="bfloat16"), step=0, phase="param", path="wte.weight",
        kind="initial-parameter", word="misaligned", precisions=SINGLE,
    ),
    # -- loss and accumulation
    "micro-means-not-weighted": Fault(
        change=lambda recipe: recipe.but(weigh=lambda number, sizes: 1 / len(sizes)), step=0, phase="loss",
        path="loss", base={"micro_batches": (2, 6)}, precisions=SINGLE,
    ),
    "micro-losses-not-divided": Fault(
        change=lambda recipe: recipe.but(weigh=lambda number, sizes: 1.0), step=0, phase="loss", path="loss",
        kind="scale", base={"micro_batches": (4, 4)}, message="its 2 micro-batches: summed instead of averaged?",
    ),
    "labels-shifted": Fault(
        change=lambda recipe: recipe.but(loss=_shifted_loss), step=0, phase="loss", path="loss",
    ),
    "mask-lets-one-through": Fault(
        change=built(setting("h.0.attn", "leak", 1)), step=0, phase="forward", path="h.0.attn.proj",
    ),
    "positions-off-by-one": Fault(
        change=built(setting("", "first_position", 1)), step=0, phase="forward", path="wpe",
    ),
    # -- kernels and precision
    "gelu-tanh": Fault(
        change=built(setting("h.0.mlp.act", "approximate", "tanh")), step=0, phase="forward", path="h.0.mlp.act",
        precisions=("float32",),
    ),
    "layer-norm-eps": Fault(
        change=built(setting("h.0.ln1", "eps", 1e-6)), step=0, phase="forward", path="h.0.ln1",
        precisions=("float32",),
    ),
    "attention-scale": Fault(
        change=built(forward("h.1.attn", _unnormalized)), step=0, phase="forward", path="h.1.attn.proj",
        precisions=("float32",),
    ),
    "mean-in-bfloat16": Fault(
        change=built(forward("h.1.ln2", _bfloat16_sum)), step=0, phase="forward", path="h.1.ln2",
        precisions=("float32",),
    ),
    "residual-in-bfloat16": Fault(
        change=built(lambda model: replace_forward(model, Block, _bfloat16_residual) and None), step=0,
        phase="forward", path="h.0.ln2", precisions=("float32",), kind="precision",
    ),
    "not-a-number": Fault(
        change=before_step(at(AT, _not_a_number)), step=AT, phase="forward", path="h.1.mlp.fc", kind="non-finite",
    ),
    "bit-flipped-in-exponent": Fault(
        change=before_step(at(AT, _flip_bit("h.0.mlp.fc.weight", 28))), step=AT, phase="param",
        path="h.0.mlp.fc.weight",
    ),
    "bit-flipped-in-mantissa": Fault(
        change=before_step(at(AT, _flip_bit("h.0.mlp.fc.weight", 22))), step=AT, phase="param",
        path="h.0.mlp.fc.weight", precisions=("float32",),
    ),
    # -- randomness
    "dropout-in-one-run": Fault(
        change=built(setting("drop", "p", 0.1)), step=0, phase="forward", path="drop", model="mlp",
    ),
    "random-state-consumed": Fault(
        change=before_step(at(AT, lambda now: torch.rand(1) and None)), step=AT, phase="batch", path="rng",
        kind="random-state", word="misaligned", base={"build": DroppedGpt},
    ),
    "recomputed-with-another-mask": Fault(
        change=built(_other_mask), step=0, phase="forward", path="mlp.drop", kind="recomputed",
        base={"build": DroppedGpt}, message="another dropout mask",
    ),
    # -- optimizer and user code
    "weight-decay-on-biases": Fault(
        change=lambda recipe: recipe.but(optimizer=lambda model: _groups(model, decay_biases=True)), step=0,
        phase="optimizer", path="optimizer.groups[1]", kind="hyper-parameter", word="misaligned",
        base={"optimizer": lambda model: _groups(model, decay_biases=False)},
        message="weight_decay is 0 in the baseline",
    ),
    "beta2": Fault(
        change=adamw(betas=(0.9, 0.95)), step=0, phase="optimizer", path="optimizer.groups[0]",
        kind="hyper-parameter", word="misaligned",
        message="betas[1] is 0.999 in the baseline and 0.95 in the candidate",
    ),
    "learning-rate-one-step-early": Fault(
        change=lambda recipe: recipe.but(schedule=lambda step: 1e-3 * min(1.0, (step + 1) / 4)), step=0,
        phase="optimizer", path="optimizer.groups[0]", kind="hyper-parameter", word="misaligned",
        base={"schedule": lambda step: 1e-3 * min(1.0, step / 4)},
    ),
    "learning-rate-decays-too-early": Fault(
        change=lambda recipe: recipe.but(schedule=lambda step: 1e-3 if step < AT else 5e-4), step=AT,
        phase="optimizer", path="optimizer.groups[0]", kind="hyper-parameter", word="misaligned",
        base={"schedule": lambda step: 1e-3 if step < AT + 1 else 5e-4},
    ),
    "no-bias-correction": Fault(
        change=lambda recipe: recipe.but(
            optimizer=lambda model: _NoBiasCorrection(model.parameters(), lr=3e-3, weight_decay=0.1)
        ),
        step=0, phase="update", path="wte.weight", kind="update-rule", message="without bias correction",
    ),
    "weight-decay-forgotten": Fault(
        change=lambda recipe: recipe.but(
            optimizer=lambda model: _NoDecay(model.parameters(), lr=3e-3, weight_decay=0.1)
        ),
        step=0, phase="update", path="wte.weight", kind="update-rule", message="without its weight decay",
        precisions=("float32", "autocast"),
    ),
    "momentum-forgotten": Fault(
        change=before_step(at(AT, _forget_moments)), step=AT, phase="optimizer", path="conv1.weight", model="conv",
        optimizer="sgd",
    ),
    "running-statistics-too-slow": Fault(
        change=built(setting("bn1", "momentum", 0.01)), step=0, phase="param", path="bn1.running_mean", model="conv",
        kind="scale", message="(= 1/10)",
    ),
    "batch-norm-in-evaluation": Fault(
        change=before_step(lambda now: now.model.get_submodule("bn1").eval() and None), step=0, phase="forward",
        path="bn1", model="conv",
    ),
    "last-state-of-another-step": Fault(
        change=built(forward("head", lambda self, x: functional.linear(x.roll(1, 0), self.weight, self.bias))), step=0,
        phase="forward", path="head", model="lstm", optimizer="adam", kind="permuted",
    ),
    "never-updated": Fault(
        change=_skip_update("h.0.attn.proj.weight"), step=0, phase="update", path="h.0.attn.proj.weight",
        kind="never-updated",
    ),
    "frozen-by-mistake": Fault(
        change=before_step(_freeze), message="In the candidate, h.0.mlp.fc.weight gets no gradient",
        step=0, phase="grad", path="h.0.mlp.fc.weight", kind="missing",
    ),
    "optimizer-without-a-parameter": Fault(
        change=lambda recipe: recipe.but(
            optimizer=lambda model: torch.optim.AdamW(
                [p for name, p in model.named_parameters() if name != "h.1.ln2.weight"], lr=3e-3, weight_decay=0.1
            )
        ),
        step=0, phase="grad", path="h.1.ln2.weight", kind="missing", message="optimizer does not hold",
    ),
}  # fmt: skip
