"""Whatever was in memory is not taken for what an operator computed: two runs of one code record the same."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import traindiff
from tests.observe.hooks.reading import rows
from traindiff.core.observation import OPERATOR_STAGES

Observed = dict[tuple[int, str, str, str, int], tuple[int, str]]


class Zoo(nn.Module):
    """Layers of many kinds, a transform, random draws, and a tensor that is filled part by part."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(4, 8, 3, padding=1), nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)
        self.lstm = nn.LSTM(8, 8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.embedding = nn.Embedding(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, 4, length] -> [batch, 8]."""
        hidden = self.norm(self.conv(x)).transpose(1, 2)
        hidden = hidden + self.embedding(torch.randint(10, hidden.shape[:2]))
        hidden, _ = self.attention(hidden, hidden, hidden)
        hidden, _ = self.lstm(hidden)
        hidden = self.encoder(hidden)
        filled = torch.empty_like(hidden)
        filled[:, :2] = hidden[:, :2]
        filled[:, 2:] = hidden[:, 2:] * 2
        return torch.vmap(lambda row: row.sum(0))(filled)


def train(path: Path, operators: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = Zoo()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with traindiff.record(path, model, optimizer, operators=operators, strict=True):
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=step == 1):
                loss = model(torch.randn(3, 4, 6)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [*(one.detach() for one in model.state_dict().values()), torch.get_rng_state()]


def observed(path: Path) -> Observed:
    return {
        (seen.step, seen.phase, seen.path, seen.slot, seen.call): (int(summary["fingerprint"]), seen.unobserved)
        for seen, summary in rows(path)
        if seen.stage in OPERATOR_STAGES
    }


def test_two_runs_of_the_same_training_record_the_same_of_every_operator(tmp_path: Path) -> None:
    outcomes = [train(tmp_path / name, operators) for name, operators in (("a", "*"), ("b", "*"), ("plain", None))]

    for first, second, plain in zip(*outcomes, strict=True):
        assert torch.equal(first, plain)
        assert torch.equal(second, plain)
    one, other = observed(tmp_path / "a"), observed(tmp_path / "b")
    assert one == other
    unknown = {slot.partition("/")[2] for (_, _, slot, _, _), (_, why) in one.items() if why}
    assert any(name.startswith("aten.empty_like") for name in unknown)
    assert len(one) > 2000
    known = {path for (_, _, path, slot, _), (_, why) in one.items() if slot == "output[0]" and not why}
    assert any("aten.sum" in path for path in known)  # what is read when all of it is written


def test_what_was_filled_part_by_part_is_known_when_it_is_full(tmp_path: Path) -> None:
    class Filling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            filled = torch.empty_like(x)
            filled[:1] = x[:1]
            filled[1:] = x[1:]
            return filled * 2

    model = nn.Sequential(nn.Linear(3, 3), Filling())
    with traindiff.record(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), operators="1") as run:
        model(torch.ones(4, 3)).sum().backward()
        run.close()

    seen = {(one.path, one.slot): one.unobserved for one, _ in rows(tmp_path / "run", phase="forward")}
    assert seen["1/aten.slice[3]", "output[0]"]  # the second part, to which nothing was written yet
    assert not seen["1/aten.mul[0]", "input[0]"]
    assert not seen["1/aten.mul[0]", "output[0]"]
