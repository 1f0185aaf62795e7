"""Batches that hold the same samples, padded further, trimmed or in another order, and faults behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

import traindiff
from traindiff.analyse.compare.verdict import Comparison

Fault = Literal["", "doubled", "row", "lost", "write"]
WORDS, WIDTH = 40, 24


class Tagger(nn.Module):
    """Attends to words, and gives each of them a tag."""

    def __init__(self, *, eps: float, dropout: float) -> None:
        super().__init__()
        self.words, self.dropout = nn.Embedding(WORDS, WIDTH), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH, eps=eps), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.words(tokens))
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill((tokens == 0)[:, None, :], float("-inf"))
        y: Tensor = self.head(self.norm(x + self.out(scores.softmax(-1) @ v)))
        return y


def trained(
    path: Path, *, further: int = 0, reordered: bool = False, fault: Fault = "", dtype: torch.dtype = torch.float32,
    eps: float = 1e-5, dropout: float = 0.0, counts_padding: bool = False,
) -> Path:  # fmt: skip
    torch.manual_seed(0)
    model = Tagger(eps=eps, dropout=dropout).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with traindiff.record(path, model, optimizer):
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            lengths = torch.randint(4, 12, (6,), generator=data)
            tokens = torch.randint(1, WORDS, (6, 12), generator=data) * (torch.arange(12) < lengths[:, None])
            tokens = pad(tokens, (0, further)) if further >= 0 else tokens[:, : int(lengths.max())]
            tokens = tokens[torch.randperm(6, generator=data)] if reordered else tokens
            labels = (tokens * 7) % WORDS
            loss = cross_entropy(
                model(tokens).flatten(0, 1).float(), labels.flatten(), ignore_index=-100 if counts_padding else 0
            )
            loss.backward()
            gradient = model.out.weight.grad
            assert gradient is not None
            if fault == "doubled" and step == 1:
                gradient *= 2
            if fault == "row":
                gradient[3] = 0
            if fault == "lost":
                gradient.zero_()
            optimizer.step()
            optimizer.zero_grad()
            if fault == "write" and step == 1:
                with torch.no_grad():
                    model.out.weight *= 1.01
    return path


FORMS = [{"further": 5}, {"further": -1}, {"reordered": True}, {"reordered": True, "further": 3}]
DTYPES = [torch.float32, torch.bfloat16]


def compared(tmp_path: Path, dtype: torch.dtype = torch.float32, **changes: object) -> Comparison:
    candidate = trained(tmp_path / "candidate", dtype=dtype, **changes)  # type: ignore[arg-type]
    return traindiff.compare(trained(tmp_path / "baseline", dtype=dtype), candidate)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_same_samples_in_another_form_are_equivalent(
    form: dict[str, object], dtype: torch.dtype, tmp_path: Path
) -> None:
    found = compared(tmp_path, dtype, **form)

    assert (found.verdict, found.findings) == ("equivalent", ())
    assert "The batch differs" in found.notes[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("fault", "step", "phase", "words"),
    [
        ("doubled", 1, "grad", "The candidate's is 2 x the baseline's"),
        ("row", 0, "grad", "24 of 576 elements are zero in the candidate"),
        ("lost", 0, "grad", "The candidate's is all zero"),
        ("write", 2, "param", "changed between step 1 and step 2"),
    ],
)
def test_a_fault_behind_another_form_is_found_where_it_is(
    fault: Fault, step: int, phase: str, words: str, form: dict[str, object], dtype: torch.dtype, tmp_path: Path
) -> None:
    found = compared(tmp_path, dtype, fault=fault, **form)

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.phase, first.path) == ("diverged", step, phase, "out.weight")
    assert words in first.message
    assert found.findings[-1].message.startswith("The batch differs")


@pytest.mark.parametrize("form", FORMS)
def test_a_wrong_setting_behind_another_form_is_named(form: dict[str, object], tmp_path: Path) -> None:
    found = compared(tmp_path, eps=0.1, **form)

    assert found.verdict == "diverged"
    assert found.findings[0].message.startswith("norm: eps is 1e-05 in the baseline and 0.1 in the candidate.")
    assert found.findings[0].evidence.get("after") != "(root) input[0]"


def test_a_loss_that_counts_padding_is_told(tmp_path: Path) -> None:
    base = trained(tmp_path / "base", counts_padding=True)
    found = traindiff.compare(base, trained(tmp_path / "further", counts_padding=True, further=5))

    first = found.first_divergence
    assert first is not None
    assert (found.verdict, first.step, first.phase) == ("diverged", 0, "loss")
    assert "holds the baseline's values and 30 more that are 0" in first.message
    assert first.message.endswith("If padded positions count in it, that is it.")


@pytest.mark.parametrize("form", [{"further": 5}, {"reordered": True}])
def test_random_masks_on_other_places_are_no_fault(form: dict[str, object], tmp_path: Path) -> None:
    base = trained(tmp_path / "base", dropout=0.1)
    found = traindiff.compare(base, trained(tmp_path / "other", dropout=0.1, **form))  # type: ignore[arg-type]

    assert found.verdict == "misaligned"
    assert found.findings[0].kind == "batch"
