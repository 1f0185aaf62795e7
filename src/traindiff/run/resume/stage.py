"""One part of a resume, on one rank: train some steps, save or load between them, and keep the state there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import distributed

from traindiff.core.observation import Observation
from traindiff.core.settings import record_settings
from traindiff.errors import ConfigError, Problem
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.run.config.setup import Setup
from traindiff.run.config.training import Training
from traindiff.run.processes.rank_process import Here
from traindiff.run.resume.held import optimizers_of
from traindiff.run.resume.leaves import leaves_of
from traindiff.run.resume.saving import load_training, refuse_half, save_training
from traindiff.run.verify.recipe import (
    Named,
    Recipe,
    failures_explained,
    load_recipe,
    name_of,
    prepared,
    undisturbed_random_state,
)
from traindiff.run.verify.training_loop import settings_of, targets_of, train

FRESH = "fresh"
"""Name of the state before anything was loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One part of a resume.

    Attributes:
        name: Of its recording.
        output: Directory of all recordings.
        first_step: Number of its first step.
        end_step: Number of the step after its last one.
        states: The state that is kept before a step, and after the last one, by the number of the step: its name.
        checkpoint: Directory that is loaded before the first step, or into which is saved after the last one.
        loads: Whether it loads.
        saved: Name of the state after saving.
        seed: Seed of torch's, NumPy's and Python's generators.
        setup: Engine, dtype, ranks.
        record: Further settings of `traindiff.record`.
        asked_by: The call, for messages.
    """

    name: str
    output: Path
    first_step: int = 0
    end_step: int
    states: Mapping[int, str]
    checkpoint: Path | None = None
    loads: bool = False
    saved: str = ""
    seed: int
    setup: Setup
    record: Mapping[str, Any] = field(default_factory=dict)
    asked_by: str


def state_path(output: Path, name: str) -> Path:
    """The recording of a state."""
    return output / "states" / name


def leaves_path(output: Path, name: str, rank: int) -> Path:
    """The file with what a rank holds beside its model and its optimizer."""
    return output / "states" / f"{name}.rank-{rank}.json"


def stage_on_rank(here: Here, recipe: Named, stage: Stage) -> dict[str, Any]:
    """Run a part on this rank; see `run_stage`."""
    found = load_recipe(recipe, asked_by=stage.asked_by) if isinstance(recipe, str) else recipe
    run_stage(found, stage, rank=here.rank, on_step=here.step_done, last_seen=here.last_seen)
    return {}


def run_stage(
    recipe: Recipe,
    stage: Stage,
    *,
    rank: int = 0,
    on_step: Callable[[int], None] = lambda _: None,
    last_seen: Callable[[Observation], None] | None = None,
) -> None:
    """Run a part of a resume as one rank.

    Args:
        recipe: Prepares the training.
        stage: The part.
        rank: This rank.
        on_step: Called with the number of each step after it.
        last_seen: Called with each observation.

    Raises:
        ConfigError: The recipe cannot be used, or the training, saving or loading fails.
    """
    where = f"recipe {name_of(recipe)}"
    with undisturbed_random_state():
        training = prepared(recipe, seed=stage.seed, asked_by=stage.asked_by, setup=stage.setup)
        refuse_half(training, where=where, asked_by=stage.asked_by)
        training = replace(training, optimizer=training.optimizer or optimizers_of(training))
        _Running(training, stage, where=where, recipe=name_of(recipe), rank=rank).run(on_step, last_seen)


class _Running:
    def __init__(self, training: Training, stage: Stage, *, where: str, recipe: str, rank: int) -> None:
        self._training = training
        self._stage = stage
        self._where = where
        self._recipe = recipe
        self._rank = rank
        self._explained = partial(failures_explained, asked_by=stage.asked_by)

    def run(self, on_step: Callable[[int], None], last_seen: Callable[[Observation], None] | None) -> None:
        stage, training = self._stage, self._training
        settings = settings_of(training, stage.record, where=self._where)
        targets = targets_of(training, settings)
        batches = self._begun()
        if stage.first_step in stage.states:
            self._keep(stage.states[stage.first_step])
        with Recorder(
            str(stage.output / stage.name), targets, settings, overwrite=True, recipe=self._recipe,
            last_seen=last_seen, first_step=stage.first_step,
        ) as recorder:  # fmt: skip
            steps = range(stage.first_step, stage.end_step)
            count = train(
                training, recorder, batches, steps, on_step=partial(self._ended, on_step), where=self._where,
                asked_by=stage.asked_by,
            )  # fmt: skip
        if count < len(steps):
            raise self._too_few(count)
        if stage.checkpoint is not None and not stage.loads:
            with self._explained("calling it", where=f"{self._where}, save"):
                save_training(training, stage.setup, stage.checkpoint, num_batches=stage.end_step)
            self._keep(stage.saved)

    def _ended(self, on_step: Callable[[int], None], step: int) -> None:
        on_step(step)
        if step + 1 in self._stage.states:
            self._keep(self._stage.states[step + 1])

    def _begun(self) -> Iterator[Any]:
        """The batches, after loading if this part loads."""
        stage, training = self._stage, self._training
        if not stage.loads:
            with self._explained("iterating over them", where=f"{self._where}, batches"):
                return iter(training.batches)
        assert stage.checkpoint is not None
        self._keep(FRESH)
        with self._explained("calling it", where=f"{self._where}, load"):
            return load_training(training, stage.setup, stage.checkpoint, where=self._where, asked_by=stage.asked_by)

    def _keep(self, name: str) -> None:
        """Write the state of the training, which is between two steps."""
        own = {name: self._training.record[name] for name in ("shards",) if name in self._training.record}
        settings = record_settings(observe=("param", "optimizer"), **own)
        with Recorder(
            str(state_path(self._stage.output, name)), targets_of(self._training, settings), settings, overwrite=True,
            recipe=self._recipe,
        ) as recorder:  # fmt: skip
            for tap in recorder.followed.values():
                tap.before_step()
                tap.after_step()
        path = leaves_path(self._stage.output, name, self._rank)
        path.write_text(json.dumps(leaves_of(self._training)))
        if distributed.is_initialized():
            distributed.barrier()

    def _too_few(self, count: int) -> ConfigError:
        loads, step = self._stage.loads, self._stage.first_step + count
        what = f"are {count} {'after loading, ' if loads else ''}and step {step} needs another."
        fix = "Give more batches, or train fewer steps (--at, --steps)."
        return ConfigError(self._stage.asked_by, [Problem(where=f"{self._where}, batches", what=what, fix=fix)])
