"""Resumes that cannot be used are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import traindiff
from tests.run.resume.parts import resumed, stages
from tests.run.resume.recipes import training
from traindiff.errors import ConfigError
from traindiff.run.resume.resume import make_empty
from traindiff.run.resume.stage import run_stage


def test_one_of_save_and_load_alone_is_refused(tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        given = training()
        return traindiff.Training(
            model=given.model, optimizer=given.optimizer, batches=given.batches, step=given.step, save=given.save
        )  # fmt: skip

    make_empty(tmp_path / "runs", "resume(...)")
    with pytest.raises(ConfigError, match="gives save and not load"):
        run_stage(recipe, stages(tmp_path / "runs")[0])


def test_a_load_that_returns_no_batches_is_refused(saved: Path, tmp_path: Path) -> None:
    def recipe() -> traindiff.Training:
        given = training()
        return traindiff.Training(
            model=given.model, optimizer=given.optimizer, batches=given.batches, step=given.step, save=given.save,
            load=lambda _: 1.5,
        )  # fmt: skip

    with pytest.raises(ConfigError, match="returned a float"):
        resumed(recipe, saved, tmp_path)


def test_a_checkpoint_of_the_users_own_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()

    with pytest.raises(ConfigError, match="would be replaced"):
        traindiff.resume("train.py:recipe", tmp_path, at=2)


@pytest.mark.parametrize("wrong", [{"at": 0}, {"at": 2, "steps": 0}])
def test_numbers_of_steps_that_cannot_be_are_refused(wrong: Mapping[str, int], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        traindiff.resume("train.py:recipe", tmp_path, **wrong)  # type: ignore[arg-type]
