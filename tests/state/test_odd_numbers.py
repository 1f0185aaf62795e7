"""Numbers that few checkpoints have: of other dtypes, in another byte order, of extreme sizes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import traindiff
from traindiff.state import elements
from traindiff.state.measured import measure
from traindiff.state.sources.opening import open_checkpoint


@pytest.mark.parametrize("dtype", [np.complex64, np.complex128])
def test_complex_numbers_with_zero_bytes_are_not_zero(dtype: type) -> None:
    size = np.dtype(dtype).itemsize
    first = np.frombuffer(b"\0" + b"\x11" * (size - 1), dtype=dtype)
    second = np.frombuffer(b"\x11" * size, dtype=dtype)

    (found,) = traindiff.weights({"w": first}, {"w": second}).differences

    assert found.kind == "other"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_are_constant_if_all_are_one_number(dtype: torch.dtype) -> None:
    one = torch.full((5, 3), 1.25 + 0.5j, dtype=dtype)
    other = one.clone()
    other[4, 2] += 2**-20
    tensors = open_checkpoint({"one": one, "other": other, "zero": torch.zeros(3, dtype=dtype)}).tensors.values()

    found = measure([(tensor, ()) for tensor in tensors])

    assert [each.is_constant for each in found] == [True, False, True]
    assert [each.is_zero for each in found] == [False, False, True]


@pytest.mark.parametrize(
    ("whole", "real", "word"),
    [
        (torch.tensor([2**53 + 1, 3]), torch.tensor([2.0**53, 3.0], dtype=torch.float64), "differs"),
        (torch.tensor([2**53, 3]), torch.tensor([2.0**53, 3.0], dtype=torch.float64), "equivalent"),
        (torch.tensor([2**24 + 1, 3]), torch.tensor([2.0**24, 3.0]), "differs"),
        (torch.tensor([2**63 - 1, 3]), torch.tensor([2.0**63, 3.0]), "differs"),
        (torch.tensor([1, 3]), torch.tensor([float("nan"), 3.0]), "differs"),
        (torch.tensor([-1, 3]), torch.tensor([2**64 - 1, 3], dtype=torch.uint64), "differs"),
    ],
)
def test_integers_are_compared_with_numbers_exactly(whole: torch.Tensor, real: torch.Tensor, word: str) -> None:
    for sides in ((whole, real), (real, whole)):
        (found,) = traindiff.weights({"w": sides[0]}, {"w": sides[1]}).relations
        assert found.word == word


def test_arrays_in_another_byte_order_are_read() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3) + 0.5
    swapped = array.astype(array.dtype.newbyteorder())

    assert traindiff.weights({"w": array, "s": array[0, 0]}, {"w": swapped, "s": swapped[0, 0]}).verdict == "identical"
    assert traindiff.weights({"w": array}, {"w": swapped + 1}).verdict == "diverged"


@pytest.mark.parametrize("size", [1e200, 1e-200, 1.0])
def test_differences_of_extreme_numbers_are_finite(monkeypatch: pytest.MonkeyPatch, size: float) -> None:
    monkeypatch.setattr(elements, "_BLOCK", 2)
    first = torch.tensor([1e-3, 1.0, 2.0, 3.0, -1.0], dtype=torch.float64)[:, None]
    second = first + torch.tensor([0.0, 0.0, 0.5, 0.0, 2.0], dtype=torch.float64)[:, None]

    (found,) = traindiff.weights({"w": size * first}, {"w": size * second}).differences
    (scaled,) = traindiff.weights({"w": size * first}, {"w": 2.5 * size * first}).differences

    assert found.evidence["relative"] == pytest.approx(math.sqrt(4.25 / 15.000001))
    assert found.evidence["largest"] == pytest.approx(2 * size)
    assert "relative L2 difference 0.532" in found.message
    assert (scaled.kind, scaled.evidence["scale"]) == ("scaled", pytest.approx(2.5))


def test_a_ratio_that_no_number_holds_is_given_as_such() -> None:
    first = torch.tensor([1e-200, 2e-200], dtype=torch.float64)

    (found,) = traindiff.weights({"w": first}, {"w": torch.tensor([1e200, 1.0], dtype=torch.float64)}).differences

    assert found.evidence["relative"] is None
    assert "relative L2 difference above 1e308" in found.message


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", [math.nan, 1e200, -0.0])
def test_evidence_from_summaries_is_finite(tmp_path: Path, value: float) -> None:
    model = torch.nn.Linear(3, 2, bias=False).double()
    with torch.no_grad():
        model.weight.fill_(value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with traindiff.record(tmp_path / "run", model, optimizer):
        model(torch.zeros(1, 3).double()).sum().backward()
        optimizer.step()
    other = torch.tensor([[1.5 * value, 1.0, 1.0]] * 2, dtype=torch.float64)
    other = torch.zeros_like(other) if value == 0.0 else other

    (found,) = traindiff.weights(tmp_path / "run", {"weight": other}).relations

    json.dumps(found.evidence, allow_nan=False)
    assert found.kind == ("bits" if value == 0.0 else "other")
    assert found.word == ("equivalent" if value == 0.0 else "differs")
