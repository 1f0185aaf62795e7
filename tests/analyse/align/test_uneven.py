"""Runs that cut the batch differently, where the rows of some tensors have no known counterpart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import traindiff
from tests.analyse.merge.test_step_table import part
from tests.made_up import Array, random
from traindiff.analyse.align.uneven import Unplaced
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.shards import Shard

SAMPLES, LENGTH, WIDTH = 8, 16, 16


class Scaled(nn.Linear):
    """A linear layer, whose output is multiplied by `wrong`."""

    wrong = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.wrong


class Experts(nn.Module):
    """Each token goes to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), Scaled(32, WIDTH)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        shares, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, token, expert(flat[token]) * shares[token, place, None])
        return out.reshape(x.shape)


class Tokens(nn.Module):
    """Embeds tokens, mixes them over positions, and predicts tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, padding_idx=0)
        self.o_proj = Scaled(WIDTH, WIDTH)
        self.experts = Experts()
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.o_proj(x.cumsum(1))
        return self.head(x + self.experts(x))


def train(path: Path, *, cut: int, padded: bool = False, wrong: str = "", **record: Any) -> None:
    """Train on batches in `cut` micro-batches; padded sentences are cut to the longest of their micro-batch."""
    torch.manual_seed(0)
    model = Tokens()
    if wrong:
        module = model.get_submodule(wrong)
        assert isinstance(module, Scaled)
        object.__setattr__(module, "wrong", 1.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = torch.tensor([16, 15, 16, 14, 9, 8, 9, 7]) if padded else torch.full((SAMPLES,), LENGTH)
    with traindiff.record(path, model, optimizer, strict=True, **record):
        for step in range(2):
            tokens = torch.randint(1, 50, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
            tokens = tokens * (torch.arange(LENGTH) < lengths[:, None])
            for part, length in zip(tokens.chunk(cut), lengths.chunk(cut), strict=True):
                given = part[:, : int(length.max())]
                labels = given[:, 1:].masked_fill(given[:, 1:] == 0, -100)
                logits = model(given)[:, :-1].flatten(0, 1)
                total = int(lengths.sum()) - SAMPLES
                (
                    functional.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum") / total
                ).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("padded", [False, True])
def test_two_runs_that_cut_alike_are_compared_micro_batch_by_micro_batch(padded: bool, tmp_path: Path) -> None:
    train(tmp_path / "baseline", cut=2, padded=padded)
    train(tmp_path / "again", cut=2, padded=padded)
    train(tmp_path / "candidate", cut=2, padded=padded, wrong="experts.experts.1.2")

    assert traindiff.compare(tmp_path / "baseline", tmp_path / "again").verdict == "identical"
    assert traindiff.check(tmp_path / "baseline").verdict == "healthy"
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence
    assert first is not None
    assert first.path == "experts.experts.1.2"


@pytest.mark.parametrize("record", [{}, {"batch_axis": {"experts.experts.*": 0}}], ids=["undeclared", "declared"])
def test_rows_that_a_router_chose_are_compared_by_norms_and_sums(record: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path / "baseline", cut=1, **record)
    train(tmp_path / "legal", cut=2, **record)
    train(tmp_path / "candidate", cut=2, wrong="experts.experts.1.2", **record)

    legal = traindiff.compare(tmp_path / "baseline", tmp_path / "legal")
    assert (legal.verdict, legal.findings, legal.unaligned) == ("equivalent", (), ((), ()))
    assert sum("Norms and sums were compared there" in note for note in legal.notes) == 1
    assert not any("batch_axis" in note for note in legal.notes)
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence
    assert first is not None
    assert first.path == "experts.experts.1.2"
    assert "Over all micro-batches together" in first.message


@pytest.mark.parametrize("record", [{}, {"batch_axis": {"experts.experts.*": 0}}], ids=["undeclared", "declared"])
def test_a_fault_before_chosen_rows_is_not_hidden(record: dict[str, Any], tmp_path: Path) -> None:
    train(tmp_path / "baseline", cut=1, **record)
    train(tmp_path / "candidate", cut=2, wrong="o_proj", **record)

    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence

    assert first is not None
    assert (first.phase, first.path, first.kind) == ("forward", "o_proj", "scale")


def test_micro_batches_padded_to_other_lengths_are_no_finding_and_hide_none(tmp_path: Path) -> None:
    train(tmp_path / "baseline", cut=1, padded=True)
    train(tmp_path / "legal", cut=2, padded=True)
    train(tmp_path / "candidate", cut=2, padded=True, wrong="o_proj")

    legal = traindiff.compare(tmp_path / "baseline", tmp_path / "legal")
    assert (legal.verdict, legal.findings, legal.unaligned) == ("equivalent", (), ((), ()))
    assert sum("cannot be compared (padding" in note for note in legal.notes) == 1
    assert not any("batch_axis" in note or "ranks disagree" in note for note in legal.notes)
    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")
    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    assert "could not be compared: what goes wrong may be at one of them" in found.first_divergence.message


class Sequences(nn.Module):
    """Packs sequences; with `positions` it also returns where each sequence was in its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.recurrent = nn.GRU(WIDTH, 24, batch_first=True)
        self.head = nn.Linear(24, 5)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
        states, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        result: Tensor = self.head(states[torch.arange(len(states)), lengths - 1])
        return result


def train_packed(path: Path, *, cut: int, lost: bool = False) -> None:
    """Train on packed sequences; `lost` loses the gradient of the first micro-batch in step 2."""
    torch.manual_seed(0)
    model = Sequences()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, strict=True):
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(50, (SAMPLES, 12), generator=generator)
            lengths = torch.randint(3, 13, (SAMPLES,), generator=generator)
            lengths[:: SAMPLES // 2] = 12  # the longest of each micro-batch
            labels = torch.randint(5, (SAMPLES,), generator=generator)
            micro_batches = zip(tokens.chunk(cut), lengths.chunk(cut), labels.chunk(cut), strict=True)
            for number, (given, long, wanted) in enumerate(micro_batches):
                (functional.cross_entropy(model(given, long), wanted) / cut).backward()
                if lost and (step, number) == (2, 0):
                    model.recurrent.zero_grad()
            optimizer.step()
            optimizer.zero_grad()


def test_indices_of_packed_sequences_are_no_finding_and_hide_no_lost_gradient(tmp_path: Path) -> None:
    train_packed(tmp_path / "baseline", cut=1)
    train_packed(tmp_path / "legal", cut=2)
    train_packed(tmp_path / "candidate", cut=2, lost=True)

    legal = traindiff.compare(tmp_path / "baseline", tmp_path / "legal")
    assert (legal.verdict, legal.findings) == ("equivalent", ())
    assert any("batch_sizes and 2 more sites cannot be compared" in note for note in legal.notes)
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence
    assert first is not None
    assert (first.step, first.phase) == (2, "grad")
    assert first.path.startswith("recurrent.")


class Membrane(nn.Module):
    """Keeps the state of a spiking layer, with a row for each sample, as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("state", torch.zeros(0))
        self.register_buffer("table", torch.ones(4, 3))

    def forward(self, rows: Tensor) -> Tensor:
        self.state = self.layer(rows).detach()
        return self.layer(rows).sigmoid()


def train_membrane(path: Path, *, cut: int, longer: bool = False, twice: bool = False) -> None:
    torch.manual_seed(0)
    model = Membrane()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    with traindiff.record(path, model, optimizer):
        for _ in range(3):
            if longer:
                model.table = torch.ones(5, 3)
            for rows in torch.randn(12, 6, generator=data).chunk(cut):
                loss = model(rows).mean() / cut
                (loss * 2 if twice else loss).backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_buffer_with_a_row_for_each_sample_of_a_micro_batch_is_no_finding(tmp_path: Path) -> None:
    train_membrane(tmp_path / "baseline", cut=1)
    train_membrane(tmp_path / "candidate", cut=2)
    result = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert result.verdict == "equivalent", str(result)
    assert any("state buffer cannot be compared" in note for note in result.notes)


@pytest.mark.parametrize(
    ("fault", "site"), [({"longer": True}, ("param", "buffer")), ({"twice": True}, ("loss", "backward"))]
)
def test_such_a_buffer_hides_no_other_one_and_no_loss(
    fault: dict[str, bool], site: tuple[str, str], tmp_path: Path
) -> None:
    train_membrane(tmp_path / "baseline", cut=1)
    train_membrane(tmp_path / "candidate", cut=2, **fault)
    first = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate").first_divergence

    assert first is not None
    assert (first.phase, first.slot) == site


class SequenceFirst(nn.Module):
    """Works on [positions, samples, channels]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.mix(self.embedding(tokens.T)).transpose(0, 1))
        return result


def test_an_axis_that_would_help_is_named(tmp_path: Path) -> None:
    for name, cut in (("baseline", 1), ("candidate", 2)):
        torch.manual_seed(0)
        model = SequenceFirst()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with traindiff.record(tmp_path / name, model, optimizer, strict=True):
            tokens = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(0))
            for part in tokens.chunk(cut):
                (functional.cross_entropy(model(part).flatten(0, 1), part.flatten()) / cut).backward()
            optimizer.step()

    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate")

    assert (found.verdict, found.findings) == ("equivalent", ())
    (note,) = (note for note in found.notes if "batch_axis" in note)
    assert '"mix": 1' in note
    assert "--batch-axis 'embedding=1'" in note or "--batch-axis 'mix=1'" in note


ROWS = random(12, 6, seed=0)


def cut(*sizes: int, values: Array = ROWS, of_batch: bool = True) -> list[Part]:
    """A batch in micro-batches of these sizes, and an activation of all its rows."""
    parts, first = [], 0
    for micro_step, count in enumerate(sizes):
        shard = Shard.of_batch((count, 6), first=first)
        about = {"micro_step": micro_step, "shard": shard}
        parts.append(part(ROWS[first : first + count], site=("batch", "", "", "input[0]"), **about))
        own = about if of_batch else {"micro_step": micro_step}
        parts.append(part(values[first : first + count], site=("forward", "", "fc", "output[0]"), order=1, **own))
        first += count
    return parts


def placed(baseline: list[Part], candidate: list[Part]) -> tuple[list[str], list[str]]:
    """Sites of which norms and sums are compared, and sites that are left out."""
    found = Unplaced()
    found.comparable((step_table(baseline), step_table(candidate)))
    return list(found.pooled), list(found.left_out)


def test_rows_that_both_runs_know_are_compared_one_by_one() -> None:
    assert placed(cut(6, 6), cut(12)) == ([], [])
    assert placed(cut(6, 6), cut(4, 8)) == ([], [])


@pytest.mark.parametrize(("baseline", "candidate"), [((6, 6), (12,)), ((12,), (6, 6)), ((6, 6), (4, 8))])
def test_rows_that_a_run_does_not_know_as_rows_are_compared_by_norms_and_sums(
    baseline: tuple[int, ...], candidate: tuple[int, ...]
) -> None:
    unknown = cut(*baseline, of_batch=False), cut(*candidate, of_batch=False)

    assert placed(*unknown) == (["fc output[0]"], [])
    assert placed(unknown[0], unknown[0]) == ([], [])  # cut in the same way


def test_whole_numbers_of_which_the_rows_are_not_known_are_left_out() -> None:
    numbers = np.arange(72).reshape(12, 6)

    assert placed(cut(6, 6, values=numbers, of_batch=False), cut(12, values=numbers, of_batch=False)) == (
        [], ["fc output[0]"],
    )  # fmt: skip
    assert placed(cut(6, 6, values=numbers), cut(12, values=numbers)) == ([], [])


def test_one_axis_that_only_one_run_takes_for_the_batch_is_not_compared_row_by_row() -> None:
    """The shapes are equal, so nothing else tells that the rows of one of them are samples."""
    known, unknown = cut(6, 6), cut(12, of_batch=False)

    assert placed(known, unknown) == (["fc output[0]"], [])
    assert placed(unknown, known) == (["fc output[0]"], [])
