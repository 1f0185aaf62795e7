"""Options of `traindiff verify` in the spellings of earlier scripts, and what launchers add."""

from __future__ import annotations

import pytest

from traindiff.cli.setup_options import spelled_as_here


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--zero_stage 3", "--zero-stage 3"),
        ("--offload_device=cpu", "--offload-device=cpu"),
        ("--gradient_accumulation_steps 2", "--gradient-accumulation-steps 2"),
        ("--use_torch_adam --verbose_logging", "--optimizer torch --verbose-logging"),
        ("--use-torch-adam", "--optimizer torch"),
        ("--iterations 5", "--steps 5"),
        ("--iterations=5", "--steps=5"),
        ("--local_rank=1 train.py:my_recipe", "train.py:my_recipe"),
        ("--local-rank 1 train.py:my_recipe", "train.py:my_recipe"),
        ("-o my_output --candidate my_train.py:a_b", "-o my_output --candidate my_train.py:a_b"),
        ("--compile -- --zero_stage", "--compile -- --zero_stage"),
    ],
)
def test_other_spellings_are_read_as_ours(given: str, read: str) -> None:
    assert list(spelled_as_here(given.split())) == read.split()
