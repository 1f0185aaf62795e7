"""Language models and other models of sequences, from their public descriptions."""

from __future__ import annotations

from math import sqrt

import torch
from benchmarks.zoo.recipe import Batch, Recipe
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Optimizer

VOCABULARY = 97
SAMPLES = 8


def next_token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of each next token."""
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def sample_tokens(data: torch.Generator) -> Batch:
    """Tokens of which some are much more frequent than others."""
    drawn = torch.rand(SAMPLES, 25, generator=data).square()
    return {"tokens": (drawn * VOCABULARY).long()}


def adamw(model: nn.Module) -> Optimizer:
    """AdamW, with weight decay of matrices only."""
    parameters = [one for one in model.parameters() if one.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.dim() >= 2], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=2e-3, betas=(0.9, 0.95))


def warm_up(step: int) -> float:
    """Linear warm-up over four steps."""
    return min(1.0, (step + 1) / 4)


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions, in which several heads share keys and values."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.size = width // heads
        self.groups = heads // shared
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared * self.size, bias=False)
        self.v_proj = nn.Linear(width, shared * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [batch, length, width] each."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (-1, self.size)).transpose(1, 2) for one in self.project(x))
        q, k = rotated(q), rotated(k)
        k, v = (one.repeat_interleave(self.groups, 1) for one in (k, v))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(found.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Rotary positions in halves: [batch, heads, length, size]."""
    half = x.shape[-1] // 2
    frequencies = 10_000.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class GatedMlp(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = GroupedAttention(width, 4, 2)
        self.post_norm = nn.RMSNorm(width, eps=1e-6)
        self.mlp = GatedMlp(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.input_norm(x))
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """Two blocks; the head is the embedding."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(LlamaBlock(width) for _ in range(2))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Experts(nn.Module):
    """Each token goes to two of four experts; their outputs are weighted by the router."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(GatedMlp(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.flatten(0, -2)
        chances = self.router(rows).float().softmax(-1)
        weights, chosen = chances.topk(2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        found = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            found = found.index_add(0, row, expert(rows[row]) * weights[row, place, None])
        used = functional.one_hot(chosen, 4).float().mean((0, 1))
        return found.view_as(x), 4 * (used * chances.mean(0)).sum()


class MoeBlock(nn.Module):
    """Attention, then experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = GroupedAttention(width, 4, 4)
        self.norm2 = nn.RMSNorm(width)
        self.moe = Experts(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        found, balance = self.moe(self.norm2(x))
        return x + found, balance


class MixtureOfExperts(nn.Module):
    """Two blocks with experts. Gives the logits, and the loss that balances the experts."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(MoeBlock(width) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens)
        total = x.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.head(self.norm(x)), total


def moe_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy, and a hundredth of the balance."""
    tokens = batch["tokens"]
    logits, balance = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()) + 0.01 * balance


class BiasedAttention(nn.Module):
    """Attention with a learned bias for each distance, to other tokens or to another sequence."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.bias = nn.Embedding(16, heads)

    def forward(self, x: Tensor, others: Tensor, is_padding: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q(x), self.k(others), self.v(others))
        )
        apart = torch.arange(others.shape[1])[None] - torch.arange(x.shape[1])[:, None]
        scores = q @ k.transpose(-2, -1) + self.bias((apart + 8).clamp(0, 15)).permute(2, 0, 1)
        scores = scores.masked_fill(is_padding[:, None, None, :], -1e4)
        if self.causal:
            scores = scores.masked_fill(apart > 0, -1e4)
        return self.o((scores.float().softmax(-1).to(v.dtype) @ v).transpose(1, 2).flatten(2))


class T5Layer(nn.Module):
    """Self-attention, attention to the encoder if there is one, and an MLP."""

    def __init__(self, width: int, *, decodes: bool) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.attention = BiasedAttention(width, 2, causal=decodes)
        self.norm2 = nn.RMSNorm(width) if decodes else None
        self.cross = BiasedAttention(width, 2, causal=False) if decodes else None
        self.norm3 = nn.RMSNorm(width)
        self.wi = nn.Linear(width, 2 * width, bias=False)
        self.act = nn.ReLU()
        self.dropout = nn.Dropout(0.0)
        self.wo = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, padding: Tensor, encoded: Tensor | None, hidden: Tensor | None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, padding)
        if self.norm2 is not None and self.cross is not None and encoded is not None and hidden is not None:
            x = x + self.cross(self.norm2(x), encoded, hidden)
        return x + self.wo(self.dropout(self.act(self.wi(self.norm3(x)))))


class T5(nn.Module):
    """An encoder of padded sources and a decoder of padded targets, with one embedding."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.ModuleList(T5Layer(width, decodes=False) for _ in range(2))
        self.decoder = nn.ModuleList(T5Layer(width, decodes=True) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        padding = source == 0
        x = self.shared(source)
        for layer in self.encoder:
            x = layer(x, padding, None, None)
        y = self.shared(target)
        for layer in self.decoder:
            y = layer(y, torch.zeros_like(target, dtype=torch.bool), x, padding)
        return self.head(self.norm(y))


def sample_pairs(data: torch.Generator) -> Batch:
    """Sources and targets of unequal lengths, padded with 0."""
    found = {}
    for name, length in (("source", 14), ("target", 10)):
        tokens = torch.randint(1, VOCABULARY, (SAMPLES, length), generator=data)
        lengths = torch.randint(length // 2, length + 1, (SAMPLES, 1), generator=data)
        found[name] = tokens * (torch.arange(length) < lengths)
    return found


def t5_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy over the tokens of the batch that are no padding."""
    target = batch["target"]
    labels = target.masked_fill(target == 0, -100)
    shifted = torch.cat([torch.zeros_like(target[:, :1]), target[:, :-1]], 1)
    logits = model(batch["source"], shifted)
    return functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def by_tokens(recipe: Recipe, batch: Batch, part: Batch, share: float) -> float:
    """The share of a micro-batch in a mean over tokens that are no padding."""
    return float((part["target"] != 0).sum() / (batch["target"] != 0).sum())


class Bert(nn.Module):
    """Blocks with the norm behind, learned positions, GELU and dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)
        layer = [BertLayer(width) for _ in range(2)]
        self.layer = nn.ModuleList(layer)
        self.transform = nn.Linear(width, width)
        self.act = nn.GELU()
        self.head_norm = nn.LayerNorm(width, eps=1e-12)
        self.decoder = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.norm(self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))))
        for layer in self.layer:
            x = layer(x)
        return self.decoder(self.head_norm(self.act(self.transform(x))))


class BertLayer(nn.Module):
    """Attention over all tokens, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm1 = nn.LayerNorm(width, eps=1e-12)
        self.intermediate = nn.Linear(width, 4 * width)
        self.act = nn.GELU()
        self.dense = nn.Linear(4 * width, width)
        self.norm2 = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        chances = (q @ k.transpose(-2, -1) / sqrt(q.shape[-1])).softmax(-1)
        x = self.norm1(x + self.dropout(self.output((chances @ v).transpose(1, 2).flatten(2))))
        return self.norm2(x + self.dropout(self.dense(self.act(self.intermediate(x)))))


def masked_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the tokens that were masked, in a mean over all tokens."""
    tokens, is_masked = batch["tokens"], batch["masked"]
    logits = model(tokens.masked_fill(is_masked, 1))
    each = functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten(), reduction="none")
    return (each * is_masked.flatten()).mean()


def sample_masked(data: torch.Generator) -> Batch:
    """Tokens, and which of them are masked."""
    batch = sample_tokens(data)
    return {**batch, "masked": torch.rand(batch["tokens"].shape, generator=data) < 0.2}


class PackedGru(nn.Module):
    """Sentences of unequal lengths, packed, through a GRU of two layers; the last states are classified."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.gru = nn.GRU(width, 24, num_layers=2, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        last = states[torch.arange(len(tokens)), lengths - 1]
        return self.head(last)


def sample_sentences(data: torch.Generator) -> Batch:
    """Sentences, their lengths and their classes."""
    lengths = torch.randint(3, 13, (SAMPLES,), generator=data)
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, 12), generator=data)
    return {
        "tokens": tokens * (torch.arange(12) < lengths[:, None]),
        "lengths": lengths,
        "labels": torch.randint(5, (SAMPLES,), generator=data),
    }


def sentence_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the classes."""
    return functional.cross_entropy(model(batch["tokens"], batch["lengths"]).float(), batch["labels"])


class SelectiveScan(nn.Module):
    """A state-space layer whose step sizes and projections depend on the input; the scan is a loop."""

    def __init__(self, width: int, states: int = 8) -> None:
        super().__init__()
        inner = 2 * width
        self.in_proj = nn.Linear(width, 2 * inner, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.act = nn.SiLU()
        self.x_proj = nn.Linear(inner, 1 + 2 * states, bias=False)
        self.dt_proj = nn.Linear(1, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, states + 1).log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.out_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner, gate = self.in_proj(x).chunk(2, -1)
        inner = self.act(self.conv(inner.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        states = (self.x_proj.out_features - 1) // 2
        size, into, out = self.x_proj(inner).split([1, states, states], -1)
        size = functional.softplus(self.dt_proj(size))
        decay = torch.exp(-size[..., None] * self.A_log.exp())
        given = size[..., None] * into[:, :, None] * inner[..., None]
        state, found = torch.zeros_like(given[:, 0]), []
        for time in range(x.shape[1]):
            state = decay[:, time] * state + given[:, time]
            found.append((state * out[:, time, None]).sum(-1))
        return self.out_proj((torch.stack(found, 1) + self.D * inner) * functional.silu(gate))


class Mamba(nn.Module):
    """Two layers of selective scans."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.mixers = nn.ModuleList(SelectiveScan(width) for _ in range(2))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        return self.head(self.norm(x))


class LowRank(nn.Module):
    """A linear layer that is kept, and a product of two thin matrices that is trained."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.lora_B.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.lora_B(self.lora_A(x))


def build_lora() -> nn.Module:
    """A frozen Llama in which low-rank changes of queries and values are trained."""
    model = Llama().requires_grad_(False)
    for layer in model.layers:
        attention = layer.attention
        attention.q_proj = LowRank(attention.q_proj)
        attention.v_proj = LowRank(attention.v_proj)
    return model


LANGUAGE = (
    Recipe(
        name="llama", build=Llama, sample=sample_tokens, loss=next_token_loss, optimizer=adamw, block=LlamaBlock,
        clip=1.0, schedule=warm_up,
    ),
    Recipe(
        name="moe", build=MixtureOfExperts, sample=sample_tokens, loss=moe_loss, optimizer=adamw, cuttable=False,
        block=MoeBlock, clip=1.0,
    ),
    Recipe(name="t5", build=T5, sample=sample_pairs, loss=t5_loss, optimizer=adamw, weigh=by_tokens, clip=1.0),
    Recipe(
        name="bert", build=Bert, sample=sample_masked, loss=masked_loss, optimizer=adamw, block=BertLayer,
        cuttable=False, schedule=warm_up,
    ),
    Recipe(
        name="gru", build=PackedGru, sample=sample_sentences, loss=sentence_loss,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=3e-3), clip=5.0,
    ),
    Recipe(name="mamba", build=Mamba, sample=sample_tokens, loss=next_token_loss, optimizer=adamw, clip=1.0),
    Recipe(
        name="lora", build=build_lora, sample=sample_tokens, loss=next_token_loss, optimizer=adamw, block=LlamaBlock,
    ),
)  # fmt: skip
