"""Two lengths, each padded within its micro-batch: no row of an encoder and a decoder has a counterpart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

import traindiff

SAMPLES, WORDS, WIDTH = 8, 60, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            layer(of).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer, of in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        heads = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        found: Tensor = self.o(heads.transpose(1, 2).flatten(2))
        return found


class Block(nn.Module):
    def __init__(self, *, crosses: bool) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))
        self.own = Attention()
        self.cross = Attention() if crosses else None
        self.hidden = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor | None = None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.own(normed, normed, None if self.cross else mask)
        if self.cross is not None and memory is not None:
            x = x + self.cross(self.norm2(x), memory, mask)
        return x + self.hidden(self.norm3(x))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.encoder = nn.ModuleList(Block(crosses=False) for _ in range(2))
        self.decoder = nn.ModuleList(Block(crosses=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask, memory, x = (source != 0)[:, None, None, :], self.embedding(source), self.embedding(target)
        for block in self.encoder:
            memory = block(memory, mask)
        for block in self.decoder:
            x = block(x, mask, memory)
        found: Tensor = self.head(x)
        return found


def batch(step: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(4, 14, (SAMPLES, 2), generator=generator).tolist()
    return [
        (torch.randint(1, WORDS, (one,), generator=generator), torch.randint(1, WORDS, (two,), generator=generator))
        for one, two in lengths
    ]


def train(path: Path, micro_steps: int, *, dtype: torch.dtype, autocast: bool, doubled: str = "") -> Path:
    torch.manual_seed(0)
    model = Translator().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            samples = batch(step)
            total = sum(len(target) - 1 for _, target in samples)
            for first in range(0, SAMPLES, SAMPLES // micro_steps):
                part = samples[first : first + SAMPLES // micro_steps]
                source, target = (pad_sequence(list(one), batch_first=True) for one in zip(*part, strict=True))
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                    logits = model(source, target[:, :-1])
                labels = target[:, 1:].flatten()
                loss = functional.cross_entropy(
                    logits.flatten(0, 1).float(), labels, ignore_index=0, reduction="sum"
                )  # fmt: skip
                (loss / total).backward()
            if doubled and step == 1:
                gradient = model.get_parameter(doubled).grad
                assert gradient is not None
                gradient *= 2
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)],
    ids=["float32", "bfloat16", "autocast"],
)
def test_what_rows_cannot_tell_is_held_against_the_noise_behind_them(
    tmp_path: Path, dtype: torch.dtype, *, autocast: bool
) -> None:
    whole = train(tmp_path / "whole", 1, dtype=dtype, autocast=autocast)
    for micro_steps in (4, 8):
        found = traindiff.compare(
            whole, train(tmp_path / f"{micro_steps}", micro_steps, dtype=dtype, autocast=autocast)
        )
        assert found.verdict == "equivalent", found.first_divergence
        assert not any("batch_axis" in note for note in found.notes)
    wrong = train(tmp_path / "wrong", 4, dtype=dtype, autocast=autocast, doubled="encoder.1.own.v.weight")
    first = traindiff.compare(whole, wrong).first_divergence
    assert first is not None
    assert (first.step, first.phase, first.path) == (1, "grad", "encoder.1.own.v.weight")
    assert "The candidate's is 2 x the baseline's" in first.message
