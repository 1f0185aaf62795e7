"""`traindiff.verify`: run a trusted training and the one in question, compare them, and pin down what is wrong."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from traindiff.analyse.compare import Verification
from traindiff.analyse.merge.renames import parse_renames
from traindiff.analyse.noise.tolerance import parse_tolerance
from traindiff.core.setting_checks import parse_replica
from traindiff.core.untrusted.demands import MOST_JSON_BYTES, parse
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, CorruptRecordingError, Problem
from traindiff.present.data import write_json
from traindiff.present.text.results import print_verification
from traindiff.run.config.obstacles import obstacles
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.config.setup import baseline_setup as trusted_way
from traindiff.run.processes.present_ranks import PresentRanks
from traindiff.run.processes.rank_end import Patience
from traindiff.run.verify.asked import Asked
from traindiff.run.verify.pinning import ForcedSteps
from traindiff.run.verify.run_recipe import Named
from traindiff.run.verify.runs import REPLICAS, Progress, Runs
from traindiff.run.verify.trusted import Pin, Question, names_of_runs, record_trusted, verify_against

REPORT, JSON, INVESTIGATION = "report.txt", "verification.json", "investigation.json"

_WIDTH = 200
_ROWS = 50


def write_files(verification: Verification, directory: Path) -> None:
    """Write the report as text, and as JSON, each at once: a reader sees the earlier one or this one.

    Args:
        verification: What to write.
        directory: Where; made if it is not there.
    """
    text, values = io.StringIO(), io.StringIO()
    print_verification(Console(file=text, width=_WIDTH, highlight=False, emoji=False), verification, top=_ROWS)
    write_json(verification, values)
    write_whole(directory / REPORT, text.getvalue())
    write_whole(directory / JSON, values.getvalue())


def refuse_others_files(directory: Path, names: Sequence[str], *, jsons: Sequence[str], asked_by: str) -> None:
    """Raise if a report would replace a file that was not written by an earlier one: it is the user's own.

    Args:
        directory: Where the report will be.
        names: What its files are called.
        jsons: What a report leaves beside them: where one of these is there, they are an earlier report's.
        asked_by: The call, for messages.

    Raises:
        ConfigError: Names all of them.
    """
    others = [name for name in jsons if (directory / name).exists() and not _is_result(directory / name)]
    if not any(_is_result(directory / name) for name in jsons):
        others += [name for name in names if (directory / name).exists()]
    problems = [
        Problem(
            where=str(directory / name),
            what="was not written by an earlier report of traindiff, and would be replaced.",
            fix="Give another directory for the runs (output, --output), or move the file away.",
        )
        for name in others
    ]
    if problems:
        raise ConfigError(asked_by, problems)


def _is_result(path: Path) -> bool:
    try:
        content = parse(Folder.of(path.parent).read(path.name, limit=MOST_JSON_BYTES), where=str(path))
        return str(content["schema"]["name"]).startswith("traindiff-")
    except (OSError, CorruptRecordingError, LookupError, TypeError):
        return False


def write_whole(path: Path, content: str) -> None:
    """Write a file at once: a reader sees what was there before, or all of this."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(path)


OUTPUT = "traindiff-verify"
"""Directory of a verification where none is given."""


def calibrate(
    recipe: Named,
    output: str | os.PathLike[str],
    *,
    steps: int = 4,
    seed: int = 0,
    replicas: Sequence[str] = REPLICAS,
    repeat: bool = True,
    setup: Setup = PLAIN,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Record a training and the runs that measure its noise.

    Args:
        recipe: Prepares the training; called once per run. By name, it is run in processes of its own.
        output: Directory for the recordings.
        steps: Batches to train on in each run.
        seed: Of torch's, NumPy's and Python's generators.
        replicas: How to perturb it; see `traindiff.record(replica=...)`.
        repeat: Also run it again as it is: what that differs by is the machine's own noise.
        setup: Under which engine, in which dtype, ... it is run.
        timeout: Seconds that a run in processes of its own may go without ending a step; see `verify`.
        progress: Called as the runs proceed.

    Returns:
        The baseline's recording, and the recordings for `traindiff.compare(noise=...)`.

    Raises:
        ConfigError: The recipe or the setup cannot be used, or the training fails, or does not repeat itself.
    """
    asked_by = "calibrate(...)"
    _check(asked_by, [setup], steps=steps, replicas=replicas, timeout=timeout)
    runs = Runs(
        directory=Path(output), seed=seed, progress=progress, asked_by=asked_by, patience=Patience(seconds=timeout)
    )
    runs.check(names_of_runs(replicas, repeat=repeat))
    trusted = record_trusted(runs, recipe, setup, steps=steps, replicas=replicas, repeat=repeat)
    return trusted.baseline, trusted.noise


def verify(
    recipe: Named,
    candidate: Named | None = None,
    output: str | os.PathLike[str] = OUTPUT,
    *,
    setup: Setup = PLAIN,
    baseline_setup: Setup | None = None,
    steps: int = 4,
    seed: int = 0,
    replicas: Sequence[str] = REPLICAS,
    repeat: bool = True,
    pin: Pin = "divergence",
    zoom: bool = False,
    rename: Mapping[str, str] | Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    record: Mapping[str, Any] | None = None,
    compiler_logs: bool = False,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run a trusted training and the one in question, compare them against measured noise, and pin down the fault.

    Where they diverge, the step is run again with every tensor of the candidate overwritten by the
    baseline's after it was recorded. Errors then neither accumulate nor cancel, and each
    operation is judged alone: natively, and where the training computes in a shorter dtype also
    in float32, in which smaller errors show.

    A recipe that is given by name (`"train.py:recipe"`) is run in fresh processes, one for each rank of its setup, and
    so is a function whose setup has an engine. Other functions are run in this process. Where a launcher (torchrun,
    deepspeed) has started several ranks, call this on all of them: rank 0 runs what has one rank, all run what has
    several, and all get the result.

    Args:
        recipe: Prepares the trusted training; called once per run, so it must be the same each time.
        candidate: Prepares the training in question; `recipe` where left out.
        output: Directory for the recordings; those of an earlier call are replaced.
        setup: Under which engine, in which dtype, ... the candidate is run.
        baseline_setup: The same of the trusted training; where left out, what computes the same in plain PyTorch.
        steps: Batches to train on in each run.
        seed: Of torch's, NumPy's and Python's generators.
        replicas: How to perturb the baseline to measure its noise; see `traindiff.record(replica=...)`.
        repeat: Also run the baseline again as it is, and say first if it does not repeat itself.
        pin: Pin the fault down on `divergence`, `always` (then in the last step if the runs do not
            diverge), or `never`.
        zoom: Where a module is wrong alone, run that step once more and name the first operator inside it that differs.
        rename: See `traindiff.compare`.
        rtol: See `traindiff.compare`.
        atol: See `traindiff.compare`.
        record: Settings of `traindiff.record` for all runs, over those of the recipes.
        compiler_logs: Have torch's compiler say what it does to the candidate, and gather that.
        timeout: Seconds that a run in processes of its own may go without ending a step. Where left out, 600 for the
            first step, then ten times the slowest step, but at least 60.
        progress: Called as the runs proceed.

    Returns:
        The comparison, what was pinned down, and what it cost. `incomplete` where the candidate failed.

    Raises:
        ConfigError: A recipe, setup or setting cannot be used, or the baseline fails or does not repeat itself.
    """
    question = Question(
        candidate=recipe if candidate is None else candidate, setup=setup, steps=steps, replicas=replicas, pin=pin,
        rename=rename, rtol=rtol, atol=atol, compiler_logs=compiler_logs, zoom=zoom,
    )  # fmt: skip
    asked = Asked(
        recipe=recipe, baseline_setup=trusted_way(setup) if baseline_setup is None else baseline_setup,
        question=question, output=Path(output), seed=seed, repeat=repeat, record=record or {}, timeout=timeout,
        progress=progress,
    )  # fmt: skip
    ranks = PresentRanks.found()
    return ranks.together(lambda: answered(asked, ranks)) if ranks else answered(asked)


def answered(asked: Asked, ranks: PresentRanks | None = None) -> Verification:
    """Verify as was asked for, and leave the report with the recordings.

    Args:
        asked: What was asked for.
        ranks: Those that are there already, of which this process leads.

    Raises:
        ConfigError: See `verify`.
    """
    check_asked(asked, ranks)
    runs = asked.runs(asked.output, ranks)
    replicas, steps, repeat = asked.question.replicas, asked.question.steps, asked.repeat
    refuse_others_files(asked.output, (REPORT,), jsons=(JSON, INVESTIGATION), asked_by=asked.asked_by)
    runs.check([*names_of_runs(replicas, repeat=repeat), "candidate"])
    runs.refuse_unusable(asked.question.candidate, asked.question.setup)  # now, not after all other runs
    trusted = record_trusted(runs, asked.recipe, asked.baseline_setup, steps=steps, replicas=replicas, repeat=repeat)
    forced = ForcedSteps(runs, trusted.recipe, setup=trusted.setup, replicas=replicas)
    verification = verify_against(trusted, asked.question, runs, forced)
    write_files(verification, runs.directory)
    return verification


def check_asked(asked: Asked, ranks: PresentRanks | None) -> None:
    """Refuse settings that cannot be used, and setups that cannot be run here.

    Raises:
        ConfigError: Lists all of them.
    """
    question, setups = asked.question, [asked.baseline_setup, asked.question.setup]
    _check(
        asked.asked_by, setups, steps=question.steps, replicas=question.replicas, pin=question.pin,
        timeout=asked.timeout,
    )  # fmt: skip
    parse_renames(question.rename)
    parse_tolerance(question.rtol, question.atol)
    if ranks is not None:
        for one in setups:
            ranks.refuse_other_sizes(one.nproc, asked.asked_by)


def _check(
    asked_by: str,
    setups: Sequence[Setup],
    *,
    steps: int,
    replicas: Sequence[str],
    pin: str = "never",
    timeout: float | None,
) -> None:
    problems = [
        found for one in replicas if isinstance(found := parse_replica(one, where=f"replicas, {one!r}"), Problem)
    ]
    if pin not in get_args(Pin):
        kind = "a moment to pin a fault down"
        problems.append(Problem.unknown_name(where="pin", kind=kind, found=str(pin), known=get_args(Pin)))
    if steps < 1:
        problems.append(
            Problem(where=f"steps={steps}", what="must be a whole number, at least 1.", fix="Write steps=4.")
        )
    if timeout is not None and not timeout > 0:
        fix = "Write timeout=600, or leave it out."
        problems.append(Problem(where=f"timeout={timeout:g}", what="must be a number of seconds above 0.", fix=fix))
    for setup in setups:
        problems += [found for found in obstacles(setup) if found not in problems]
    if problems:
        raise ConfigError(asked_by, problems)
