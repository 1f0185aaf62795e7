"""Batches that hold the same samples, padded to another length."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import traindiff
from tests.analyse.noise.test_site_floors import site
from traindiff.analyse.align.padding import padding_of
from traindiff.analyse.compare import Comparison

MORE = "holds the baseline's values and 6 more that are {}"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"])
def test_padding_with_zeros_is_known_in_every_dtype(dtype: str) -> None:
    values = np.arange(1, 13).reshape(2, 6).astype(dtype)
    padded = np.pad(values, ((0, 0), (0, 3)))

    assert padding_of(site(values, padded)) == MORE.format(0)
    assert padding_of(site(padded, values)) == "lacks 6 of the baseline's values, all of which are 0"
    assert padding_of(site(padded, padded)) == ""


@pytest.mark.parametrize("value", [-100, 1, -1, 77, -55])  # the last two are extremes of what is padded
def test_padding_with_usual_values_and_with_extremes_is_known(value: int) -> None:
    values = np.arange(10, 22, dtype=np.int64).reshape(2, 6)

    assert padding_of(site(values, np.pad(values, ((0, 0), (0, 3)), constant_values=value))) == MORE.format(value)


def test_other_values_are_no_padding() -> None:
    values = np.arange(10, 22, dtype=np.int64).reshape(2, 6)
    padded = np.pad(values, ((0, 0), (0, 3)))
    padded[1, 2] += 1

    assert padding_of(site(values, padded)) == ""
    assert padding_of(site(values, np.concatenate((values, values), axis=1))) == ""
    assert padding_of(site(values.astype(np.float32), np.pad(values, ((0, 0), (0, 3))))) == ""


class Tagger(nn.Module):
    def __init__(self, *, looks_at_padding: bool) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 12), nn.Linear(12, 12), nn.Linear(12, 5)
        self.looks_at_padding = looks_at_padding

    def forward(self, tokens: Tensor) -> Tensor:
        seen = torch.ones_like(tokens) if self.looks_at_padding else (tokens > 0).long()
        hidden = torch.tanh(self.mix(self.embed(tokens))) * seen[..., None]
        y: Tensor = self.head(hidden + hidden.sum(1, keepdim=True) / seen.sum(1)[:, None, None])
        return y


def trained(path: Path, *, length: int, looks_at_padding: bool = False, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = Tagger(looks_at_padding=looks_at_padding).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer):
        for _ in range(3):
            tokens, labels = (torch.randint(1, high, (6, 7), generator=data) for high in (20, 5))
            logits = model(pad(tokens, (0, length - 7)))
            cross_entropy(logits[:, :7].flatten(0, 1).float(), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


def compared(tmp_path: Path, *, looks_at_padding: bool, dtype: torch.dtype = torch.float32) -> Comparison:
    baseline = trained(tmp_path / "baseline", length=7, dtype=dtype)
    candidate = trained(tmp_path / "candidate", length=16, dtype=dtype, looks_at_padding=looks_at_padding)
    return traindiff.compare(baseline, candidate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_that_is_padded_further_is_another_representation(dtype: torch.dtype, tmp_path: Path) -> None:
    found = compared(tmp_path, looks_at_padding=False, dtype=dtype)

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert "holds the baseline's values and 54 more that are 0" in found.notes[0]
    assert not any("first divergence" in note for note in found.notes)
    assert "first divergence" not in str(found)


def test_a_model_that_looks_at_padding_is_found(tmp_path: Path) -> None:
    found = compared(tmp_path, looks_at_padding=True)

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.phase) == ("diverged", 0, "loss")
    assert first.message.startswith("(root): looks_at_padding is False in the baseline and True in the candidate. The")
    assert "The batch differs in its padding: (root) input[0] holds the baseline's values and 54 more" in first.message
    assert first.message.endswith("If padded positions count in it, that is it.")
    assert [one.phase for one in found.findings][-1] == "batch"


class Placed(nn.Module):
    """Embeds tokens and their positions, and computes each token by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.head = nn.Embedding(20, 12), nn.Embedding(40, 12), nn.Linear(12, 5)

    def forward(self, tokens: Tensor, positions: Tensor, bias: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.embed(tokens) + self.place(positions) + bias.sum()))
        return y


def placed(path: Path, how: str) -> Path:
    torch.manual_seed(0)
    model = Placed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer):
        for _ in range(3):
            lengths = torch.randint(2, 8, (5,), generator=data)
            tokens, labels = (torch.randint(1, high, (5, 7), generator=data) for high in (20, 5))
            kept = torch.arange(7) < lengths[:, None]
            positions, zeros = torch.arange(7).expand(5, 7), torch.zeros(7, 7)
            if how == "padded":
                logits = model(tokens * kept, positions, zeros)[kept]
            elif how == "one by one":
                parts = zip(tokens, positions, lengths.tolist(), strict=True)
                logits = torch.cat([model(one[None, :n], at[None, :n], zeros[:n, :n])[0] for one, at, n in parts])
            elif how.startswith("in two parts"):
                more = 0.01 if how.endswith("wrong bias") else 0.0
                parts = [(slice(0, 4), zeros[:4, :4]), (slice(4, 7), zeros[4:] + more)]
                logits = torch.cat([model((tokens * kept)[:, at], positions[:, at], bias) for at, bias in parts], 1)[
                    kept
                ]
            else:
                begins = positions[kept] if how == "packed" else torch.arange(int(kept.sum()))
                logits = model(tokens[kept][None], begins[None], torch.zeros(1, len(begins)))[0]
            cross_entropy(logits, labels[kept]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@pytest.mark.parametrize("how", ["packed", "one by one", "in two parts"])
def test_a_batch_may_be_padded_packed_or_given_in_parts(how: str, tmp_path: Path) -> None:
    padded, other = (placed(tmp_path / name, name) for name in ("padded", how))

    for pair in ((padded, other), (other, padded)):
        found = traindiff.compare(*pair)

        assert (found.verdict, found.findings) == ("equivalent", ()), str(found)


@pytest.mark.parametrize("how", ["packed with other positions", "in two parts with a wrong bias"])
def test_other_positions_and_another_bias_are_found(how: str, tmp_path: Path) -> None:
    padded, wrong = (placed(tmp_path / name, name) for name in ("padded", how))

    assert traindiff.compare(padded, wrong).verdict not in ("identical", "equivalent")
