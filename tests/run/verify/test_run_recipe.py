"""Settings of recipes are those of `traindiff.record`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from traindiff.errors import ConfigError
from traindiff.run.demo.recipes import mlp
from traindiff.run.verify.recipe import Training
from traindiff.run.verify.run_recipe import run_recipe


def test_a_misspelt_setting_of_a_recipe_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    def misspelt() -> Training:
        return replace(mlp(), record={"evry": 2})

    with pytest.raises(ConfigError, match=r'"evry" is not a setting.\n    Did you mean "every"\?'):
        run_recipe(misspelt, tmp_path / "run", num_steps=1, seed=0, asked_by="verify(...)")

    assert not (tmp_path / "run").exists()
