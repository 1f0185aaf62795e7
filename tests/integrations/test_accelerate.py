"""`traindiff.record` is given what Accelerate has prepared; the library itself prepares it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import traindiff
from tests.integrations.same_bits import differing, micro_steps, numbers, sites

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed; make test-integrations")

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


def train(recording: Path | None, *, given: bool = True, **settings: Any) -> dict[str, Tensor]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.utils.set_seed(4)
    accelerator = accelerate.Accelerator(cpu=True, **settings)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    observed = nullcontext() if recording is None else traindiff.record(recording, model, optimizer if given else None)
    with observed:
        for x, y in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.ones(2, 6))
    return {name: one.clone() for name, one in accelerator.unwrap_model(model).state_dict().items()}


@pytest.mark.parametrize("given", [True, False], ids=["optimizer-given", "optimizer-found"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2, "mixed_precision": "bf16"}],
    ids=["plain", "accumulated-bfloat16"],
)
def test_a_training_computes_the_same_bits_and_is_recorded(
    tmp_path: Path, settings: dict[str, Any], given: bool
) -> None:
    without = train(None, **settings)
    recording, again = tmp_path / "recording", tmp_path / "again"

    assert differing(without, train(recording, given=given, **settings)) == []
    accumulated = settings.get("gradient_accumulation_steps", 1)
    assert numbers(recording) == list(range(8 // accumulated))
    assert micro_steps(recording, step=1) == list(range(accumulated))
    assert {
        ("batch", "", "input[0]"), ("forward", "0", "output[0]"), ("grad", "3.bias", "grad"),
        ("optimizer", "0.weight", "exp_avg"),
    } <= sites(recording, step=1)  # fmt: skip
    train(again, given=given, **settings)
    assert traindiff.compare(recording, again).verdict == "identical"
