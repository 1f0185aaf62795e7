"""Runs of the small training under setups, in this process and on ranks."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import traindiff
from tests.on_ranks import run_on_ranks
from tests.run.config.recipes import RECIPES
from traindiff.run.config.setup import Setup, baseline_setup
from traindiff.run.verify.run_recipe import run_recipe

Case = tuple[str, Setup]
"""The name of a recipe, and how it is run."""


def run(recipe: str, setup: Setup, path: str) -> str:
    return run_recipe(RECIPES[recipe], path, num_steps=2, seed=0, asked_by="test", setup=setup, strict=True)


def run_all(directory: str, cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    """On every rank: one run after the other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's own: FSDP1, the tracing frontend
        for name, recipe, setup in cases:
            run(recipe, Setup(**setup), f"{directory}/{name}")


def run_candidates(directory: Path, cases: Mapping[str, Case], *, timeout_seconds: float = 120.0) -> None:
    """Each under its name, on 2 ranks."""
    given = [(name, recipe, replace(setup, nproc=2).to_json()) for name, (recipe, setup) in cases.items()]
    run_on_ranks(run_all, 2, str(directory), given, timeout_seconds=timeout_seconds)


def run_baselines(directory: Path, cases: Mapping[str, Case]) -> dict[str, Path]:
    """By name of a case: the recording that it is compared with, which several may have in common."""
    made: dict[tuple[str, Setup], Path] = {}
    for recipe, setup in cases.values():
        plain = baseline_setup(replace(setup, nproc=2))
        if (recipe, plain) not in made:
            made[recipe, plain] = Path(run(recipe, plain, str(directory / f"baseline-{len(made)}")))
    return {name: made[recipe, baseline_setup(replace(setup, nproc=2))] for name, (recipe, setup) in cases.items()}


def compared(baseline: Path, candidate: Path) -> traindiff.Comparison:
    """Two recordings compared, of which neither has anything that the other has not."""
    comparison = traindiff.compare(baseline, candidate)
    assert not any(comparison.unaligned), str(comparison)
    return comparison
