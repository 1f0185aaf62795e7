"""The same elements in other shapes: a batch whose axes are joined, and sets that are padded or called one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import pad_sequence

import traindiff

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def rays(path: Path, *, shape: tuple[int, ...], dtype: torch.dtype, factor: float = 1.0, beta: float = 1.0) -> Path:
    """A field over points along rays; a batch has 12 rays of 10 points, in this shape."""
    torch.manual_seed(0)
    field = nn.Sequential(nn.Linear(24, 48), nn.Softplus(), nn.Linear(48, 48), nn.Softplus(beta=beta), nn.Linear(48, 4))
    field = field.to(dtype)
    optimizer = torch.optim.NAdam(field.parameters(), 1e-3)
    with traindiff.record(path, field, optimizer):
        for step in range(3):
            data = torch.Generator().manual_seed(step)
            points, color = torch.randn(12, 10, 24, generator=data), torch.rand(12, 4, generator=data)
            out = field(points.to(dtype).reshape(*shape, 24)).reshape(12, 10, 4).float()
            (factor * mse_loss(out.sigmoid().mean(1), color)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@DTYPES
@pytest.mark.parametrize("shape", [(120,), (4, 3, 10), (12, 2, 5)], ids=str)
def test_a_batch_with_other_axes_is_the_same_batch(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    base = rays(tmp_path / "base", shape=(12, 10), dtype=dtype)

    found = traindiff.compare(base, rays(tmp_path / "other", shape=shape, dtype=dtype))

    assert found.verdict == "equivalent", str(found)
    assert "(root) input[0] holds the same values in another shape: [12, 10, 24] in the baseline" in str(found)


@DTYPES
@pytest.mark.parametrize(
    ("fault", "place"), [({"factor": 1.5}, ("loss", "loss")), ({"beta": 2.0}, ("forward", "3"))], ids=str
)
def test_a_fault_behind_a_batch_with_other_axes_is_found_in_its_place(
    fault: dict[str, float], place: tuple[str, str], dtype: torch.dtype, tmp_path: Path
) -> None:
    base = rays(tmp_path / "base", shape=(12, 10), dtype=dtype)

    found = traindiff.compare(base, rays(tmp_path / "other", shape=(120,), dtype=dtype, **fault))

    assert found.verdict == "diverged", str(found)
    assert found.first_divergence is not None
    assert (found.first_divergence.phase, found.first_divergence.path) == place


def test_a_batch_of_another_shape_with_other_values_is_another_batch(tmp_path: Path) -> None:
    def train(path: Path, *, flat: bool) -> Path:
        model = nn.Linear(6, 3)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with traindiff.record(path, model, optimizer):
            x = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(int(flat)))
            model(x.flatten(0, 1) if flat else x).square().mean().backward()
            optimizer.step()
        return path

    found = traindiff.compare(train(tmp_path / "a", flat=False), train(tmp_path / "b", flat=True))

    assert found.verdict == "misaligned", str(found)
    assert "has shape [4, 5, 6] in the baseline, [20, 6] in the candidate" in str(found)


How = Literal["one by one", "padded", "joined"]


class Sets(nn.Module):
    """Sums what it computes for each point of a set."""

    def __init__(self, how: How, *, lost: bool) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 32))
        self.whole = nn.Sequential(nn.Linear(32, 16), nn.Softplus(), nn.Linear(16, 4))
        self.how, self.lost = how, lost

    def forward(self, sets: list[Tensor]) -> Tensor:
        lengths = torch.tensor([len(one) for one in sets])
        if self.how == "padded":
            held = torch.arange(int(lengths.max())) < (lengths - int(self.lost))[:, None]
            together = (self.point(pad_sequence(sets, batch_first=True)) * held[..., None]).sum(1)
        elif self.how == "joined":
            points = self.point(torch.cat(sets))
            owner = torch.repeat_interleave(torch.arange(len(sets)), lengths)
            together = points.new_zeros(len(sets), 32).index_add(0, owner, points)
        else:
            together = torch.stack([self.point(one).sum(0) for one in sets])
        y: Tensor = self.whole(together)
        return y


def of_sets(path: Path, how: How, dtype: torch.dtype, *, lost: bool = False, beta: float = 1.0, since: int = 0) -> Path:
    torch.manual_seed(0)
    model = Sets(how, lost=lost).to(dtype)
    optimizer = torch.optim.Adagrad(model.parameters(), 1e-2)
    with traindiff.record(path, model, optimizer):
        for step in range(4):
            data = torch.Generator().manual_seed(step)
            lengths = torch.randint(3, 9, (8,), generator=data).tolist()
            sets = [torch.randn(length, 3, generator=data).to(dtype) for length in lengths]
            if step == since:
                model.whole[1].beta = beta
            cross_entropy(model(sets).float(), torch.randint(4, (8,), generator=data)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return path


@DTYPES
@pytest.mark.parametrize("how", ["padded", "joined"])
def test_a_module_may_be_called_on_padded_sets_or_on_each(how: How, dtype: torch.dtype, tmp_path: Path) -> None:
    base, other = of_sets(tmp_path / "base", "one by one", dtype), of_sets(tmp_path / "other", how, dtype)

    for pair in ((base, other), (other, base)):
        found = traindiff.compare(*pair)
        assert found.verdict == "equivalent", str(found)
        assert ("for other rows (padded ones, or a call for each sample)" in str(found)) == (how == "padded")


@DTYPES
@pytest.mark.parametrize("since", [0, 2])
def test_a_fault_behind_padded_sets_is_found_in_its_place(since: int, dtype: torch.dtype, tmp_path: Path) -> None:
    base = of_sets(tmp_path / "base", "one by one", dtype)

    found = traindiff.compare(base, of_sets(tmp_path / "other", "padded", dtype, beta=4.0, since=since))

    assert found.verdict == "diverged", str(found)
    assert found.first_divergence is not None
    assert (found.first_divergence.step, found.first_divergence.path) == (since, "whole.1")


def test_rows_that_are_lost_for_good_are_found_where_the_shape_differs(tmp_path: Path) -> None:
    base = of_sets(tmp_path / "base", "one by one", torch.float32)

    found = traindiff.compare(base, of_sets(tmp_path / "other", "padded", torch.float32, lost=True))

    assert found.verdict == "diverged", str(found)
    assert found.first_divergence is not None
    assert (found.first_divergence.kind, found.first_divergence.path) == ("shape", "point.0")
