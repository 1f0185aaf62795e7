"""One run of a recipe, as a rank in a process of its own makes it."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from traindiff.errors import ConfigError, Problem
from traindiff.launching.rank_process import Here
from traindiff.recipes.loading import load_recipe
from traindiff.recipes.recipe import Recipe, name_of, prepared, refuse_without_loss
from traindiff.recipes.run_recipe import run_recipe
from traindiff.setups.setup import PLAIN, Setup

Named = Recipe | str
"""A recipe, or where it is found: `FILE.py:FUNCTION`, `MODULE:FUNCTION`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What a run is, so that it can be handed to another process.

    Attributes:
        recipe: Prepares the training.
        path: Recording to write.
        num_steps: Batches to train on.
        seed: Of torch's, NumPy's and Python's generators.
        setup: How it is run.
        asked_by: The call, for messages.
        compiler_logs: Have torch's compiler say what it does.
        settings: Further arguments of `run_recipe`.
    """

    recipe: Named
    path: str
    num_steps: int
    seed: int
    setup: Setup
    asked_by: str
    compiler_logs: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)


def record_on_rank(here: Here, run: RecordedRun) -> dict[str, Any]:
    """Make one rank's part of the run."""
    if run.compiler_logs:
        _have_the_compiler_talk()
    recipe = load_recipe(run.recipe, asked_by=run.asked_by) if isinstance(run.recipe, str) else run.recipe
    run_recipe(
        recipe, run.path, num_steps=run.num_steps, seed=run.seed, setup=run.setup, asked_by=run.asked_by,
        on_step=here.step_done, last_seen=here.last_seen, overwrite=True, **run.settings,
    )  # fmt: skip
    return {"peak_bytes": peak_bytes()}


def check_on_rank(here: Here, recipe: Named, seed: int, setup: Setup, asked_by: str) -> None:  # noqa: ARG001
    """`check_recipe` in a process of its own."""
    check_recipe(recipe, seed, setup, asked_by)


def check_recipe(recipe: Named, seed: int, setup: Setup, asked_by: str) -> None:
    """Prepare the training once, as it is, and refuse what cannot be used.

    Raises:
        ConfigError: The recipe cannot be used, or not under the setup.
    """
    found = load_recipe(recipe, asked_by=asked_by) if isinstance(recipe, str) else recipe
    training = prepared(found, seed=seed, asked_by=asked_by, setup=PLAIN)
    refuse_without_loss(training, setup, where=f"recipe {name_of(found)}", asked_by=asked_by)


def refuse_unlaunchable(recipe: Recipe, asked_by: str) -> None:
    """Raise `ConfigError` where a function cannot be handed to another process."""
    try:
        pickle.dumps(recipe)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        problem = Problem(
            where=f"recipe {name_of(recipe)}",
            what=f"is to run in processes of its own, and they cannot import it: {error}",
            fix='Define it at the top of a file, and give it by name: "FILE.py:FUNCTION".',
        )
        raise ConfigError(asked_by, [problem]) from None


def peak_bytes() -> int:
    """Largest resident memory of this process so far; 0 where the system does not tell."""
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0


def _have_the_compiler_talk() -> None:
    import torch._logging as logs

    logs.set_logs(guards=True, recompiles=True, graph_breaks=True)  # type: ignore[attr-defined]
