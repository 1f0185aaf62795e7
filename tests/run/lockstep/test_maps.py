"""A port with other modules beside the model that it was made from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import traindiff
from tests.analyse.compare.ports import MAP, WORDS, Model, original, ported
from traindiff.errors import ConfigError


def lockstep(model: Model, port: Model, layout: Path, **settings: object) -> traindiff.Lockstep:
    def loss(one: nn.Module, batch: Tensor) -> Tensor:
        value: Tensor = one(batch[:, :-1], batch[:, 1:])
        return value

    layout.write_text(MAP)
    sides = ((one, torch.optim.AdamW(one.parameters(), lr=1e-3)) for one in (model, port))
    data = [torch.randint(0, WORDS, (4, 7), generator=torch.Generator().manual_seed(step)) for step in range(3)]
    return traindiff.Lockstep(*sides, data, loss=loss, map=layout, **settings)  # type: ignore[arg-type]


def test_a_port_agrees_with_its_original_by_a_map(tmp_path: Path) -> None:
    model = original()

    found = lockstep(model, ported(model), tmp_path / "map.toml", track_activations=True).go()

    assert (found.verdict, found.unaligned) == ("equivalent", ((), ())), str(found)
    assert found.calibrated
    assert ("grad", "h.1.attn.{q,k,v}.weight") in {(row.phase, row.path) for row in found.differences}


def test_a_wrong_gradient_of_a_fused_weight_is_located(tmp_path: Path) -> None:
    model = original()
    port = ported(model)
    port.get_parameter("blocks.1.mixer.qkv.weight").register_hook(lambda gradient: 0.97 * gradient)

    found = lockstep(model, port, tmp_path / "map.toml").go()

    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    assert (found.first_divergence.phase, found.first_divergence.path) == ("grad", "h.1.attn.{q,k,v}.weight")


def test_a_candidate_with_a_map_cannot_be_reset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="laid out otherwise"):
        lockstep(original(), original(), tmp_path / "map.toml", resync=True)
