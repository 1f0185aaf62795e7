"""Run a recipe and record it, in this process or as one rank of a launched run."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from traindiff.core.observation import Observation
from traindiff.core.setting_checks import ReplicaSetting
from traindiff.core.settings import RecordSettings
from traindiff.core.torch_compat.compiling import log_recompilations
from traindiff.errors import ConfigError, Problem
from traindiff.observe.torch.perturb import make_replica
from traindiff.observe.torch.perturb.precision import PrecisionReplica
from traindiff.observe.torch.perturb.replica import Replica, compiled_parts
from traindiff.observe.torch.perturb.ulp import is_rounded, randomly_rounded, rounding_key
from traindiff.observe.torch.session.recorder import Recorder
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.session.teacher_forcing import ForcedValues
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.processes.rank_process import Here
from traindiff.run.verify.determinism import DROPOUT, controlled, take_out_dropout
from traindiff.run.verify.recipe import (
    Named,
    Recipe,
    failures_explained,
    load_recipe,
    name_of,
    prepared,
    refuse_without_loss,
    undisturbed_random_state,
)
from traindiff.run.verify.training_loop import settings_of, targets_of, train
from traindiff.storage import open_recording


def run_recipe(
    recipe: Recipe,
    path: str | os.PathLike[str],
    *,
    num_steps: int,
    seed: int,
    asked_by: str,
    forced_by: str | None = None,
    precision: torch.dtype | None = None,
    on_step: Callable[[int], None] | None = None,
    last_seen: Callable[[Observation], None] | None = None,
    overwrite: bool = False,
    setup: Setup = PLAIN,
    controls: Sequence[str] = (),
    **settings: Any,
) -> str:
    """Train for some steps, from scratch, and record it.

    Args:
        recipe: Prepares the training.
        path: Recording to write.
        num_steps: Batches to train on.
        seed: Seed of torch's, NumPy's and Python's generators, which are restored afterwards.
        asked_by: The call, for messages.
        forced_by: A recording with full tensors. In its steps, its values replace the training's after they were
            observed; a `ulp` replica perturbs these values.
        precision: Compute everything in this dtype.
        on_step: Called with the number of each batch after training on it.
        last_seen: Called with each observation.
        overwrite: Replace a recording that is already at `path`.
        setup: Engine, dtype, ... of the training. With several ranks, call this on each of them, in a process group.
        controls: Determinism controls; see `traindiff.run.verify.determinism`.
        **settings: Settings of `traindiff.record`; they override the training's own.

    Returns:
        The path.

    Raises:
        ConfigError: The recipe cannot be used or fails, a setting is wrong, or there are no batches.
    """
    where = f"recipe {name_of(recipe)}"
    with undisturbed_random_state(), controlled(controls):
        training = prepared(recipe, seed=seed, asked_by=asked_by, setup=setup)
        if DROPOUT in controls:
            take_out_dropout(training.model)
        checked = settings_of(training, settings, where=where)
        targets = targets_of(training, checked)
        if forced_by is not None or precision is not None:
            _refuse_compiled(targets, where=where, asked_by=asked_by)
        forced = None if forced_by is None else _forced_values(forced_by, checked.replica)
        replica = _replica(targets, checked, precision=precision, forced=forced is not None)
        with Recorder(
            os.fspath(path), targets, checked, overwrite=overwrite, replica=replica, forced=forced,
            recipe=name_of(recipe), last_seen=last_seen,
        ) as recorder:  # fmt: skip
            with failures_explained("iterating over them", where=f"{where}, batches", asked_by=asked_by):
                batches = iter(training.batches)
            trained = train(
                training, recorder, batches, range(num_steps), on_step=on_step or (lambda _: None), where=where,
                asked_by=asked_by,
            )  # fmt: skip
    if not trained:
        problem = Problem(where=f"{where}, batches", what="are none.", fix="Give at least one batch.")
        raise ConfigError(asked_by, [problem])
    return os.fspath(path)


def _refuse_compiled(targets: Targets, *, where: str, asked_by: str) -> None:
    if compiled := compiled_parts(targets.root):
        problem = Problem(
            where=f"{where}, model",
            what=f"is compiled ({compiled}), and what compiled code computes cannot be replaced on the way.",
            fix="Verify the same training without torch.compile.",
        )
        raise ConfigError(asked_by, [problem])


def _replica(
    targets: Targets, settings: RecordSettings, *, precision: torch.dtype | None, forced: bool
) -> Replica | None:
    """The perturbation of the training; a forced `ulp` replica rounds the forced values instead."""
    if precision is not None:
        return PrecisionReplica(precision, targets.root)
    if settings.replica is None or (forced and settings.replica.kind == "ulp"):
        return None
    return make_replica(settings.replica, targets.root, targets.names)


def _forced_values(path: str, replica: ReplicaSetting | None) -> ForcedValues:
    if replica is None or replica.kind != "ulp":
        return ForcedValues(open_recording(path))
    seed = replica.seed
    return ForcedValues(
        open_recording(path),
        perturb=lambda value, site: randomly_rounded(value, rounding_key(seed, site)) if is_rounded(value) else value,
    )


def record_on_rank(here: Here, recipe: Named, run: Callable[..., str], asked_by: str, compiler_logs: bool) -> Any:  # noqa: FBT001
    """Run and record this rank's part; `run` is `run_recipe` with all settings."""
    if compiler_logs:
        log_recompilations()
    found = load_recipe(recipe, asked_by=asked_by) if isinstance(recipe, str) else recipe
    run(found, on_step=here.step_done, last_seen=here.last_seen)
    return {"peak_bytes": peak_bytes()}


def check_on_rank(here: Here, recipe: Named, seed: int, setup: Setup, asked_by: str) -> None:  # noqa: ARG001
    """`check_recipe` in its own process."""
    check_recipe(recipe, seed, setup, asked_by)


def check_recipe(recipe: Named, seed: int, setup: Setup, asked_by: str) -> None:
    """Prepare the training once, without a setup.

    Raises:
        ConfigError: The recipe cannot be used, or not under the setup.
    """
    found = load_recipe(recipe, asked_by=asked_by) if isinstance(recipe, str) else recipe
    training = prepared(found, seed=seed, asked_by=asked_by, setup=PLAIN)
    refuse_without_loss(training, setup, where=f"recipe {name_of(found)}", asked_by=asked_by)


def refuse_unlaunchable(recipe: Recipe, asked_by: str) -> None:
    """Raise `ConfigError` if a function cannot be sent to another process."""
    try:
        pickle.dumps(recipe)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        problem = Problem(
            where=f"recipe {name_of(recipe)}",
            what=f"is to run in processes of its own, and they cannot import it: {error}.",
            fix='Define it at the top of a file, and give it by name: "FILE.py:FUNCTION".',
        )
        raise ConfigError(asked_by, [problem]) from None


def peak_bytes() -> int:
    """Largest resident memory of this process so far; 0 if the system does not tell."""
    with suppress(ImportError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return 0
