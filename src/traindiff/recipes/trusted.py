"""The trusted training, recorded, with the recordings that measure its noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from traindiff.comparison import Comparison, compare
from traindiff.errors import ConfigError, Problem
from traindiff.recipes.failed import RunFailedError, refused
from traindiff.recipes.recipe import name_of
from traindiff.recipes.recorded_run import Named
from traindiff.recipes.runs import Runs
from traindiff.setups.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """A baseline and its noise.

    Attributes:
        recipe: Prepares the training.
        setup: How it was run.
        baseline: Its recording.
        noise: Recordings for `traindiff.compare(noise=...)`.
    """

    recipe: Named
    setup: Setup
    baseline: str
    noise: tuple[str, ...]


def record_trusted(
    runs: Runs, recipe: Named, setup: Setup, *, steps: int, replicas: Sequence[str], repeat: bool
) -> Trusted:
    """Run the trusted training, again as it is, and in its replicas.

    Raises:
        ConfigError: The recipe cannot be used, fails, or does not repeat itself.
    """
    with needed(runs):
        baseline, repeated = record_repeated(runs, recipe, setup, steps=steps, repeat=repeat)
        if repeated:
            refuse_what_does_not_repeat(recipe, compare(baseline, repeated), runs.asked_by)
        return with_replicas(runs, recipe, setup, (baseline, repeated), steps=steps, replicas=replicas)


def record_repeated(runs: Runs, recipe: Named, setup: Setup, *, steps: int, repeat: bool) -> tuple[str, str]:
    """Run the trusted training, and again as it is; gives both recordings, the second empty where it was not wanted.

    Raises:
        ConfigError: The recipe cannot be used.
        RunFailedError: A run fails; see `needed`.
    """
    names = ["baseline", *(["repeated"] if repeat else [])]
    found = [runs.run(recipe, name, num_steps=steps, setup=setup) for name in names]
    return found[0], found[1] if repeat else ""


def with_replicas(
    runs: Runs, recipe: Named, setup: Setup, recorded: tuple[str, str], *, steps: int, replicas: Sequence[str]
) -> Trusted:
    """Run the replicas of what `record_repeated` has run.

    Raises:
        ConfigError: The recipe cannot be used.
        RunFailedError: A run fails; see `needed`.
    """
    baseline, *noise = (path for path in recorded if path)
    noise += [runs.run(recipe, _name(one), num_steps=steps, setup=setup, replica=one) for one in replicas]
    return Trusted(recipe=recipe, setup=setup, baseline=baseline, noise=tuple(noise))


@contextmanager
def needed(runs: Runs) -> Iterator[None]:
    """Inside it are runs without which nothing can be said: where one fails, that is a `ConfigError`."""
    try:
        yield
    except RunFailedError as failed:
        raise refused(failed, runs.asked_by) from (failed.error.__cause__ if failed.error else failed)


def names_of_runs(replicas: Sequence[str], *, repeat: bool) -> list[str]:
    """What `record_trusted` calls its runs."""
    return ["baseline", *(["repeated"] if repeat else []), *map(_name, replicas)]


def recipe_name(recipe: Named) -> str:
    """What a recipe is called in messages."""
    return recipe if isinstance(recipe, str) else name_of(recipe)


def _name(replica: str) -> str:
    return replica.replace(":", "-")


def refuse_what_does_not_repeat(recipe: Named, comparison: Comparison, asked_by: str) -> None:
    """Raise `ConfigError` where a recipe prepares another training when it is called again."""
    first = comparison.first_divergence
    if first is not None and comparison.verdict == "misaligned":
        problem = Problem(
            where=f"recipe {recipe_name(recipe)}",
            what=f"is not the same training when it is called again. In step {first.step}: {first.says}",
            fix="Prepare model, data and generators from scratch in each call; torch, NumPy and random are seeded.",
        )
        raise ConfigError(asked_by, [problem])
