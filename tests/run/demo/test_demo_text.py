from __future__ import annotations

from pathlib import Path

import pytest
import torch

from traindiff.errors import ConfigError
from traindiff.run.demo.model import make_batch, read_text


def test_the_text_is_source_code_and_the_same_every_time() -> None:
    text = read_text()
    assert torch.equal(text, read_text())
    assert b"import" in bytes(text.tolist())
    assert len(text) > 100_000


def test_any_sources_do_where_the_chosen_modules_are_missing(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "second.py").write_bytes(b"2")
    (tmp_path / "first.py").write_bytes(b"1")
    assert bytes(read_text(tmp_path).tolist()) == b"12"


def test_a_library_without_sources_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_text(tmp_path)
    assert str(caught.value) == (
        "1 problem in the demo; nothing was trained.\n"
        "\n"
        f"  standard library in {tmp_path}\n"
        "    holds no Python source files, which are the text that the demo trains on.\n"
        "    Use a Python that was installed with its sources, neither zipped nor stripped."
    )


def test_each_target_is_the_byte_after_its_input() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    batch = make_batch(text, 3, batch_size=5, context=7, seed=1)
    assert batch.inputs.shape == batch.targets.shape == (5, 7)
    assert batch.inputs.dtype == batch.targets.dtype == batch.sample_ids.dtype == torch.int64
    assert torch.equal(batch.targets, batch.inputs + 1)


def test_no_sample_number_comes_twice() -> None:
    text = torch.arange(200, dtype=torch.uint8)
    ids = [make_batch(text, step, batch_size=5, context=7, seed=0).sample_ids for step in range(4)]
    assert torch.cat(ids).tolist() == list(range(20))


def test_another_seed_gives_other_samples() -> None:
    text = read_text()
    batches = [make_batch(text, 0, batch_size=5, context=7, seed=seed) for seed in (0, 1)]
    assert not torch.equal(batches[0].inputs, batches[1].inputs)


def test_micro_batches_are_the_batch_in_order() -> None:
    batch = make_batch(read_text(), 0, batch_size=6, context=7, seed=0)
    parts = batch.split(3)
    assert [len(part.inputs) for part in parts] == [2, 2, 2]
    for name in ("inputs", "targets", "sample_ids"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
