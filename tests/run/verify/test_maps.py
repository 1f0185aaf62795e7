"""A port with other modules, verified by a map."""

from __future__ import annotations

from pathlib import Path

import torch

import traindiff
from tests.analyse.compare.ports import MAP, WORDS, Model, original, ported


def training(model: Model) -> traindiff.Training:
    return traindiff.Training(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        batches=[torch.randint(0, WORDS, (4, 7), generator=torch.Generator().manual_seed(step)) for step in range(3)],
        loss=lambda one, batch: one(batch[:, :-1], batch[:, 1:]),
    )


def plain() -> traindiff.Training:
    return training(original())


def port() -> traindiff.Training:
    return training(ported(original()))


def wrong_port() -> traindiff.Training:
    model = ported(original())
    model.get_parameter("blocks.1.mixer.qkv.weight").register_hook(lambda gradient: 0.97 * gradient)
    return training(model)


def test_a_port_is_verified_by_a_map(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(MAP)

    found = traindiff.verify(plain, port, output=tmp_path / "runs", map=tmp_path / "map.toml", steps=3)

    assert (found.verdict, found.comparison.calibrated) == ("equivalent", True), str(found)


def test_a_fault_behind_a_map_is_located_and_pinned_down(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(MAP)

    found = traindiff.verify(plain, wrong_port, output=tmp_path / "runs", map=tmp_path / "map.toml", steps=3)

    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    assert (found.first_divergence.phase, found.first_divergence.path) == ("grad", "h.1.attn.{q,k,v}.weight")
