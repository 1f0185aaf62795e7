"""Further legal variations: layers, losses and trainings written another way."""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from tests.faults.models import Attention, Block, ConvNet, FeedForward
from tests.faults.recipe import Recipe
from tests.faults.variations import Variation, _accumulated, _forwards


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _prepared(change: Callable[[nn.Module], Any]) -> Variation:
    def prepare(model: nn.Module) -> None:
        change(model)

    return lambda recipe: recipe.but(prepare=prepare)


# -- linear layers, activations, norms, embeddings


def _transposed(self: nn.Linear, x: Tensor) -> Tensor:
    found = (self.weight @ x.flatten(0, -2).T).T.unflatten(0, x.shape[:-1])
    return found if self.bias is None else found + self.bias


def _in_four_parts(self: nn.Linear, x: Tensor) -> Tensor:
    parts = zip(_wide(x).chunk(4, -1), _wide(self.weight).chunk(4, -1), strict=True)
    found = sum(part @ weight.T for part, weight in parts)
    return (found if self.bias is None else found + _wide(self.bias)).to(torch.result_type(x, self.weight))


def _gelu(self: nn.GELU, x: Tensor) -> Tensor:
    wide = _wide(x)
    return (0.5 * wide * (1.0 + torch.erf(wide / sqrt(2.0)))).to(x.dtype)


def _layer_norm_as_group_norm(self: nn.LayerNorm, x: Tensor) -> Tensor:
    rows = _wide(x).flatten(0, -2)
    found = functional.group_norm(rows, 1, eps=self.eps)
    return (found * _wide(self.weight) + _wide(self.bias)).to(self.weight.dtype).unflatten(0, x.shape[:-1])


def _one_hot(self: nn.Embedding, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):  # to which embeddings are not subject
        return functional.one_hot(tokens, self.num_embeddings).to(self.weight.dtype) @ self.weight


# -- attention


def _attention(find: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Attention, Tensor], Tensor]:
    def forward(self: Attention, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.proj(find(q, k, v).transpose(1, 2).flatten(2))

    return forward


def _scores(q: Tensor, k: Tensor) -> Tensor:
    scores = (q / sqrt(q.shape[-1])) @ k.transpose(-2, -1)
    return scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)


def _written_out_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _wide(_scores(q, k))
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    return weights.to(v.dtype) @ v


def _online_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Over the keys in two blocks, as flash attention goes."""
    scores = _wide(_scores(q, k))
    largest = torch.full_like(scores[..., :1], -1e30)
    total, found = torch.zeros_like(largest), torch.zeros_like(_wide(q))
    for block, values in zip(scores.chunk(2, -1), _wide(v).chunk(2, -2), strict=True):
        now = torch.maximum(largest, block.amax(-1, keepdim=True)).detach()
        weights = (block - now).exp()
        shrink = (largest - now).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        found = found * shrink + weights @ values
        largest = now
    return (found / total).to(v.dtype)


def _math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def _head_by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads = [_scores(q[:, h], k[:, h]).softmax(-1) @ v[:, h] for h in range(q.shape[1])]
    return torch.stack(heads, 1)


def _fused_projections(model: nn.Module) -> None:
    """One matmul for query, key and value, each handed out by the module that holds its weights."""
    for module in model.modules():
        if isinstance(module, Attention):
            _fuse(module)


def _fuse(module: Attention) -> None:
    parts = [module.q, module.k, module.v]
    held: dict[str, Any] = {}

    def first(x: Tensor) -> Tensor:
        weight, bias = (torch.cat([getattr(part, name) for part in parts]) for name in ("weight", "bias"))
        held["parts"] = functional.linear(x, weight, bias).chunk(3, -1)
        return held["parts"][0]

    module.q.forward = first  # type: ignore[method-assign]
    module.k.forward = lambda x: held["parts"][1]  # type: ignore[method-assign]
    module.v.forward = lambda x: held["parts"][2]  # type: ignore[method-assign]


def _reentrant(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is Block:
            plain = Block.forward.__get__(module)
            module.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=True)  # type: ignore[method-assign]


# -- convolutions


def _unfolded(self: nn.Conv2d, x: Tensor) -> Tensor:
    columns = functional.unfold(x, self.kernel_size, padding=self.padding, stride=self.stride)  # type: ignore[arg-type]
    rows = self.weight.flatten(1) @ columns
    side = x.shape[-1] // self.stride[0]
    return rows.unflatten(-1, (side, side)) + self.bias[:, None, None]


def _channels_last(recipe: Recipe) -> Recipe:
    def batch(data: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, labels = recipe.batch(data)
        return inputs.to(memory_format=torch.channels_last), labels

    return recipe.but(batch=batch, prepare=lambda model: model.to(memory_format=torch.channels_last) and None)


def _batch_norm(self: nn.BatchNorm2d, x: Tensor) -> Tensor:
    wide = _wide(x)
    mean = wide.mean((0, 2, 3))
    variance = (wide - mean[:, None, None]).square().mean((0, 2, 3))
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), 0.1)
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), 0.1)
        self.num_batches_tracked += 1
    scale = _wide(self.weight) * torch.rsqrt(variance + self.eps)
    shift = _wide(self.bias) - mean * scale
    return (wide * scale[:, None, None] + shift[:, None, None]).to(x.dtype)


def _mean_as_product(self: ConvNet, x: Tensor) -> Tensor:
    x = functional.relu(self.bn1(self.conv1(x)))
    x = functional.relu(self.bn2(self.conv2(x))).flatten(2)
    return self.head((x @ x.new_full((x.shape[-1], 1), 1 / x.shape[-1]))[..., 0])


# -- recurrence


def _unrolled(self: nn.LSTM, x: Tensor) -> Any:
    h, c = x.new_zeros(len(x), self.hidden_size), x.new_zeros(len(x), self.hidden_size)
    states = []
    for now in x.unbind(1):
        gates = functional.linear(now, self.weight_ih_l0, self.bias_ih_l0) + functional.linear(
            h, self.weight_hh_l0, self.bias_hh_l0
        )
        i, f, g, o = gates.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, 1), (h[None], c[None])


# -- the training around the model


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    logits = _wide(logits).flatten(0, -2)
    return (logits.logsumexp(-1) - logits.gather(-1, labels.flatten()[:, None])[:, 0]).mean()


def _compiled(recipe: Recipe) -> Recipe:
    def build() -> nn.Module:
        torch.compiler.reset()
        return torch.compile(recipe.build(), backend="aot_eager")  # type: ignore[return-value]

    return recipe.but(build=build)


def _kept_gradients(recipe: Recipe) -> Recipe:
    return recipe.but(zero_grad=lambda now: now.optimizer.zero_grad(set_to_none=False))


def _without_onednn(recipe: Recipe) -> Recipe:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return recipe.loss(logits, labels)

    def prepare(model: nn.Module) -> None:
        plain = model.forward

        def forward(*inputs: Any) -> Any:
            with torch.backends.mkldnn.flags(enabled=False):
                return plain(*inputs)

        model.forward = forward  # type: ignore[method-assign]

    return recipe.but(loss=loss, prepare=prepare)


def _permuted_batch(recipe: Recipe) -> Recipe:
    def batch(data: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, labels = recipe.batch(data)
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(3))
        return inputs[order], labels[order]

    return recipe.but(batch=batch)


def _permuted_channels(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FeedForward):
            order = torch.randperm(module.fc.out_features, generator=torch.Generator().manual_seed(3))
            with torch.no_grad():
                module.fc.weight.copy_(module.fc.weight[order])
                module.fc.bias.copy_(module.fc.bias[order])
                module.proj.weight.copy_(module.proj.weight[:, order])


def _permuted_filters(model: nn.Module) -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        for path in ("conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"):
            model.get_parameter(path).copy_(model.get_parameter(path)[order])
        model.get_parameter("conv2.weight").copy_(model.get_parameter("conv2.weight")[:, order])


EVERYWHERE: dict[str, Variation] = {
    "compiled": _compiled,
    "linear-transposed": _forwards(nn.Linear, _transposed),
    "linear-in-four-parts": _forwards(nn.Linear, _in_four_parts),
    "cross-entropy": lambda recipe: recipe.but(loss=_cross_entropy),
    "gradients-zeroed-in-place": _kept_gradients,
    "without-onednn": _without_onednn,
}
OF_MODEL: dict[str, dict[str, Variation]] = {
    "gpt": {
        "accumulated-8": _accumulated(*[1] * 8),
        "accumulated-7-1": _accumulated(7, 1),
        "gelu-written-out": _forwards(nn.GELU, _gelu),
        "layer-norm-as-group-norm": _forwards(nn.LayerNorm, _layer_norm_as_group_norm),
        "one-hot-embedding": _forwards(nn.Embedding, _one_hot),
        "softmax-written-out": _forwards(Attention, _attention(_written_out_softmax)),
        "softmax-online": _forwards(Attention, _attention(_online_softmax)),
        "attention-math": _forwards(Attention, _attention(_math_attention)),
        "attention-head-by-head": _forwards(Attention, _attention(_head_by_head)),
        "fused-projections": _prepared(_fused_projections),
        "checkpointed-reentrant": _prepared(_reentrant),
    },
    "conv": {
        "convolution-unfolded": _forwards(nn.Conv2d, _unfolded),
        "channels-last": _channels_last,
        "batch-norm-by-hand": _forwards(nn.BatchNorm2d, _batch_norm),
        "mean-as-product": _forwards(ConvNet, _mean_as_product),
    },
    "lstm": {"unrolled": _forwards(nn.LSTM, _unrolled)},
    "mlp": {},
}
REPRESENTATION: dict[str, dict[str, Variation]] = {
    "gpt": {"batch-permuted": _permuted_batch, "channels-permuted": _prepared(_permuted_channels)},
    "conv": {"batch-permuted": _permuted_batch, "channels-permuted": _prepared(_permuted_filters)},
    "lstm": {"batch-permuted": _permuted_batch},
    "mlp": {"batch-permuted": _permuted_batch},
}
"""Variations that only hold things in another order: `equivalent`, with what differs as `representation`."""


def rewritten(model: str) -> dict[str, Variation]:
    """By name: the further variations of a model that leave every tensor as it is."""
    return {**EVERYWHERE, **OF_MODEL[model]}
