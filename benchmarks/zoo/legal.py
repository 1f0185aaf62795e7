"""Legal variations: other ways to compute the same training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf, sqrt
from typing import Any

import torch
from benchmarks.zoo.language import GroupedAttention
from benchmarks.zoo.recipe import Batch, Now, Recipe
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

Changed = Callable[[Recipe], Recipe]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variation:
    """A legal variation.

    Attributes:
        change: Makes the candidate from the baseline.
        applies: Whether it changes anything in a training, and is legal there; gets the training and a model of it.
        exact: Whether it computes the same bits.
        restructured: Whether modules are not called, or rows are in another order, so that only losses, gradients and
            updates can be compared, and no step can be forced.
    """

    change: Changed
    applies: Callable[[Recipe, nn.Module], bool]
    exact: bool = False
    restructured: bool = False


def replace_forward(model: nn.Module, kind: type[nn.Module], forward: Callable[..., Any]) -> None:
    """Give every module of exactly this class another forward. The class may have parametrized subclasses."""
    for module in model.modules():
        if type(module) is kind:
            module.forward = partial(forward, module)


def forwards(kind: type[nn.Module], forward: Callable[..., Any], **more: Any) -> Variation:
    """Other forwards of all modules of a class."""

    def change(recipe: Recipe) -> Recipe:
        return recipe.but(prepare=lambda model: replace_forward(model, kind, forward))

    return Variation(change=change, applies=lambda _, model: has(model, kind), **more)


def has(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether the model has a module of exactly one of these classes."""
    return any(type(module) in kinds for module in model.modules())


def always(*_: Any) -> bool:
    """Applies to every training."""
    return True


def linear_columns(module: nn.Linear, x: Tensor) -> Tensor:
    """Output features in two halves."""
    half = max(1, module.out_features // 2)
    weights = module.weight.split([half, module.out_features - half])
    biases = (None, None) if module.bias is None else module.bias.split([half, module.out_features - half])
    return torch.cat([functional.linear(x, w, b) for w, b in zip(weights, biases, strict=True)], -1)


def linear_rows(module: nn.Linear, x: Tensor) -> Tensor:
    """Input features in two halves, whose products are added."""
    half = module.in_features // 2
    found = functional.linear(x[..., :half], module.weight[:, :half])
    found = found + functional.linear(x[..., half:], module.weight[:, half:])
    return found if module.bias is None else found + module.bias


def linear_einsum(module: nn.Linear, x: Tensor) -> Tensor:
    """As a sum over indices."""
    found = torch.einsum("...i,oi->...o", x, module.weight)
    return found if module.bias is None else found + module.bias


def wide(x: Tensor) -> Tensor:
    """Float32, unless it is wider."""
    return x if x.dtype == torch.float64 else x.float()


def layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    """From the mean of squares."""
    y = wide(x)
    mean = y.mean(-1, keepdim=True)
    variance = (y * y).mean(-1, keepdim=True) - mean * mean
    return ((y - mean) * torch.rsqrt(variance + module.eps) * module.weight + module.bias).to(output_type(module, x))


def output_type(module: nn.Module, x: Tensor) -> torch.dtype:
    """What a norm returns, which depends on autocast."""
    with torch.no_grad():
        found: Tensor = type(module).forward(module, x.detach())
    return found.dtype


def rms_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    """By its formula, in float32."""
    y = wide(x)
    eps = torch.finfo(y.dtype).eps if module.eps is None else module.eps  # torch takes that of the dtype it computes in
    found = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (found * module.weight).to(output_type(module, x))


def group_norm(module: nn.GroupNorm, x: Tensor) -> Tensor:
    """By its formula, in float32."""
    y = wide(x).unflatten(1, (module.num_groups, -1)).flatten(2)
    variance, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
    y = ((y - mean) / torch.sqrt(variance + module.eps)).view_as(x)
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    return (y * module.weight.view(shape) + module.bias.view(shape)).to(output_type(module, x))


def batch_norm(module: nn.BatchNorm2d, x: Tensor) -> Tensor:
    """By its formula, in float32, with running statistics."""
    y = wide(x)
    axes = [axis for axis in range(x.dim()) if axis != 1]
    variance, mean = torch.var_mean(y, axes, correction=0)
    if module.training and module.running_mean is not None and module.running_var is not None:
        number = y.numel() / y.shape[1]
        with torch.no_grad():
            momentum = 0.1 if module.momentum is None else module.momentum
            module.running_mean.lerp_(mean.to(module.running_mean.dtype), momentum)
            module.running_var.lerp_((variance * number / (number - 1)).to(module.running_var.dtype), momentum)
            assert module.num_batches_tracked is not None
            module.num_batches_tracked.add_(1)
    shape = (1, -1, *(1 for _ in x.shape[2:]))
    y = (y - mean.view(shape)) * torch.rsqrt(variance.view(shape) + module.eps)
    return (y * module.weight.view(shape) + module.bias.view(shape)).to(x.dtype)


def gelu(module: nn.GELU, x: Tensor) -> Tensor:
    """From the error function."""
    y = wide(x)
    return (0.5 * y * (1 + torch.erf(y / sqrt(2)))).to(x.dtype)


def silu(module: nn.SiLU, x: Tensor) -> Tensor:
    """From the sigmoid."""
    y = wide(x)
    return (y * torch.sigmoid(y)).to(x.dtype)


def embedding(module: nn.Embedding, tokens: Tensor) -> Tensor:
    """As a product with one-hot rows."""
    return functional.one_hot(tokens, module.num_embeddings).to(module.weight.dtype) @ module.weight


def bag(module: nn.EmbeddingBag, tokens: Tensor) -> Tensor:
    """Rows, and their sum or mean."""
    rows = module.weight[tokens]
    return rows.sum(1) if module.mode == "sum" else rows.mean(1)


def convolution(module: nn.Conv2d, x: Tensor) -> Tensor:
    """As a product with patches."""
    kernel, stride, padding = module.kernel_size, module.stride, module.padding
    assert not isinstance(padding, str)
    patches = functional.unfold(x, kernel, padding=padding, stride=stride)
    found = module.weight.flatten(1) @ patches
    if module.bias is not None:
        found = found + module.bias[:, None]
    height = (x.shape[2] + 2 * padding[0] - kernel[0]) // stride[0] + 1
    return found.unflatten(-1, (height, -1))


def fused_projection(module: GroupedAttention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three products in one; the modules are not called."""
    parts = (module.q_proj, module.k_proj, module.v_proj)
    found = functional.linear(x, torch.cat([one.weight for one in parts]))
    return found.split([one.out_features for one in parts], -1)


def fuse(model: nn.Module) -> None:
    """Queries, keys and values in one product."""
    for module in model.modules():
        if isinstance(module, GroupedAttention):
            module.project = partial(fused_projection, module)


def functional_call(model: nn.Module) -> None:
    """Linear layers in containers are computed from their weights, without a call of the module."""
    for container in model.modules():
        if type(container) is nn.Sequential:
            container.forward = partial(through, container)


def through(container: nn.Sequential, x: Tensor) -> Tensor:
    """What a container returns."""
    for module in container:
        x = functional.linear(x, module.weight, module.bias) if type(module) is nn.Linear else module(x)
    return x


def checkpointed(recipe: Recipe) -> Recipe:
    """Blocks are computed again in the backward pass."""
    kind = recipe.block
    assert kind is not None
    plain = kind.forward

    def forward(module: nn.Module, *args: Any) -> Any:
        return checkpoint(partial(plain, module), *args, use_reentrant=False)

    return recipe.but(prepare=lambda model: replace_forward(model, kind, forward))


def optimizer_options(**options: Any) -> Changed:
    """Another implementation of the optimizer."""

    def change(recipe: Recipe) -> Recipe:
        def build(model: nn.Module) -> Any:
            found = recipe.optimizer(model)
            for optimizer in found.values() if isinstance(found, dict) else [found]:
                for group in optimizer.param_groups:
                    group.update(options)
            return found

        return recipe.but(optimizer=build)

    return change


def has_implementations(recipe: Recipe, _: nn.Module) -> bool:
    """Whether the optimizer has more than one."""
    return recipe.name not in ("lbfgs",)


def permuted(recipe: Recipe) -> Recipe:
    """The samples of each batch in another order."""

    def begin(now: Now) -> None:
        number = len(next(iter(now.batch.values())))
        order = torch.randperm(number, generator=torch.Generator().manual_seed(now.step))
        now.batch = {name: one[order] for name, one in now.batch.items()}

    return recipe.but(begin=begin)


def strided(recipe: Recipe) -> Recipe:
    """The batch in another order of memory."""

    def begin(now: Now) -> None:
        now.batch = {
            name: one.transpose(0, -1).contiguous().transpose(0, -1) if one.dim() > 1 else one
            for name, one in now.batch.items()
        }

    return recipe.but(begin=begin)


def channels_last(recipe: Recipe) -> Recipe:
    """Model and images in channels_last."""

    def begin(now: Now) -> None:
        now.batch = {
            name: one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one
            for name, one in now.batch.items()
        }

    return recipe.but(prepare=lambda model: model.to(memory_format=torch.channels_last), begin=begin)


@contextmanager
def two_threads() -> Iterator[None]:
    """Two threads."""
    torch.set_num_threads(2)
    try:
        yield
    finally:
        torch.set_num_threads(1)


@contextmanager
def deterministic() -> Iterator[None]:
    """Only deterministic algorithms."""
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=False)


def summed_loss(recipe: Recipe) -> Recipe:
    """The losses of single samples, added up and divided by their number."""
    plain = recipe.loss

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (plain(model, batch) * 3.0) / 3.0

    return recipe.but(loss=loss)


def compiled(recipe: Recipe) -> Recipe:
    """The model through torch.compile, whose backend runs the same operators."""
    return recipe.but(prepare=lambda model: model.compile(backend="eager"))


def around(context: Callable[[], Any]) -> Changed:
    """A context around each step."""
    return lambda recipe: recipe.but(around=context)


def in_place(model: nn.Module) -> None:
    """Activations write over what they are given."""
    for module in model.modules():
        if isinstance(module, (nn.ReLU, nn.SiLU, nn.LeakyReLU)):
            module.inplace = not module.inplace


def is_cuttable(recipe: Recipe, model: nn.Module) -> bool:
    """Whether micro-batches are legal: no draws, no statistics over the batch."""
    draws = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    return recipe.cuttable and not draws


def micro_batches(*shares: float) -> Changed:
    """Shares of the batch."""
    return lambda recipe: recipe.but(micro_batches=shares)


LEGAL: dict[str, Variation] = {
    "again": Variation(change=lambda recipe: recipe, applies=always, exact=True),
    "threads": Variation(change=around(two_threads), applies=always),
    "deterministic": Variation(change=around(deterministic), applies=always),
    "without-onednn": Variation(
        change=around(lambda: torch.backends.mkldnn.flags(enabled=False)), applies=always
    ),
    "strided-inputs": Variation(change=strided, applies=always),
    "scaled-loss": Variation(change=summed_loss, applies=lambda recipe, _: recipe.name != "gan"),
    "float64": Variation(
        change=lambda recipe: recipe.but(double=True), applies=lambda recipe, _: recipe.precision == "float32"
    ),
    "optimizer-foreach": Variation(change=optimizer_options(foreach=True), applies=has_implementations),
    "optimizer-for-loop": Variation(change=optimizer_options(foreach=False), applies=has_implementations),
    "clip-for-loop": Variation(
        change=lambda recipe: recipe.but(clip_foreach=False), applies=lambda recipe, _: recipe.clip < inf
    ),
    "accumulated-2": Variation(change=micro_batches(0.5, 0.5), applies=is_cuttable),
    "accumulated-unequal": Variation(change=micro_batches(0.25, 0.5, 0.25), applies=is_cuttable),
    "permuted-batch": Variation(change=permuted, applies=is_cuttable, restructured=True),
    "linear-columns": forwards(nn.Linear, linear_columns),
    "linear-rows": forwards(nn.Linear, linear_rows),
    "linear-einsum": forwards(nn.Linear, linear_einsum),
    "layer-norm": forwards(nn.LayerNorm, layer_norm),
    "rms-norm": forwards(nn.RMSNorm, rms_norm),
    "group-norm": forwards(nn.GroupNorm, group_norm),
    "batch-norm": forwards(nn.BatchNorm2d, batch_norm),
    "gelu": forwards(nn.GELU, gelu),
    "silu": forwards(nn.SiLU, silu),
    "in-place": Variation(
        change=lambda recipe: recipe.but(prepare=in_place),
        applies=lambda _, model: has(model, nn.ReLU, nn.SiLU, nn.LeakyReLU) and not has(model, nn.GroupNorm),
        exact=True,
    ),
    "embedding": Variation(
        change=lambda recipe: recipe.but(prepare=lambda model: replace_forward(model, nn.Embedding, embedding)),
        applies=lambda recipe, model: has(model, nn.Embedding) and recipe.name != "gru",  # of which a row is padding
    ),
    "bag": forwards(nn.EmbeddingBag, bag),
    "convolution": forwards(nn.Conv2d, convolution),
    "channels-last": Variation(change=channels_last, applies=lambda _, model: has(model, nn.Conv2d)),
    "attention-math": Variation(
        change=around(lambda: sdpa_kernel([SDPBackend.MATH])),
        applies=lambda _, model: has(model, GroupedAttention, nn.MultiheadAttention),
    ),
    "fused-projections": Variation(
        change=lambda recipe: recipe.but(prepare=fuse),
        applies=lambda recipe, model: has(model, GroupedAttention) and recipe.name != "lora", restructured=True,
    ),
    "functional-linear": Variation(
        change=lambda recipe: recipe.but(prepare=functional_call),
        applies=lambda recipe, model: recipe.name in ("actor-critic", "dlrm", "sam", "lbfgs", "gradient-penalty"),
        restructured=True,
    ),
    "checkpointed": Variation(change=checkpointed, applies=lambda recipe, _: recipe.block is not None, exact=True),
    "compiled": Variation(change=compiled, applies=lambda recipe, _: recipe.name in ("llama", "resnet", "dlrm")),
}  # fmt: skip
"""By name."""


def variations(recipe: Recipe) -> dict[str, Variation]:
    """The legal variations of a training, by name."""
    model = recipe.build()
    return {name: one for name, one in LEGAL.items() if one.applies(recipe, model)}
