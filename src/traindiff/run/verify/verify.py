"""`traindiff.verify`: run a trusted training and the one in question, compare them, and pin down what is wrong."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from traindiff.analyse.compare import Verification
from traindiff.core.untrusted.demands import MOST_JSON_BYTES, parse
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, CorruptRecordingError, Problem
from traindiff.present.data import write_json
from traindiff.present.text.results import print_report
from traindiff.run.config.options import STEPS
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.config.setup import baseline_setup as trusted_way
from traindiff.run.processes.present_ranks import PresentRanks
from traindiff.run.verify.failed import RunFailedError
from traindiff.run.verify.recipe import Named
from traindiff.run.verify.request import Pin, VerifyRequest
from traindiff.run.verify.runs import REPLICAS, Progress, Runs
from traindiff.run.verify.trusted import (
    Trusted,
    names_of_runs,
    needed,
    record_trusted,
    verify_against,
    without_baseline,
)

REPORT, JSON, INVESTIGATION = "report.txt", "verification.json", "investigation.json"

_WIDTH = 200
_ROWS = 50


def write_files(verification: Verification, directory: Path) -> None:
    """Write the report as text and as JSON. Each file appears at once, so a reader never sees half of it."""
    write_text_and_json(verification, directory, JSON, print_report)


def write_text_and_json(result: Any, directory: Path, json_name: str, show: Callable[..., None]) -> None:
    """Write a result as text, as `show` prints it, and as JSON."""
    text, values = io.StringIO(), io.StringIO()
    show(Console(file=text, width=_WIDTH, highlight=False, emoji=False), result, top=_ROWS)
    write_json(result, values)
    write_whole(directory / REPORT, text.getvalue())
    write_whole(directory / json_name, values.getvalue())


def refuse_others_files(directory: Path, names: Sequence[str], *, jsons: Sequence[str], asked_by: str) -> None:
    """Raise `ConfigError` if a report would replace a file that no earlier report wrote: it is the user's own.

    If one of the JSON files that reports leave exists, the other files are an earlier report's too.
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
    """Write a file atomically: a reader sees the old content or the complete new content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(content, encoding="utf-8")
    unfinished.replace(path)


OUTPUT = "traindiff-verify"
"""Default directory of a verification."""


def calibrate(
    recipe: Named,
    output: str | os.PathLike[str],
    *,
    steps: int = STEPS,
    seed: int = 0,
    replicas: Sequence[str] = REPLICAS,
    repeat: bool = True,
    setup: Setup = PLAIN,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> tuple[str, tuple[str, ...]]:
    """Record a training and the runs that measure its noise.

    Args:
        recipe: Prepares the training; called once per run. A recipe given by name runs in its own processes.
        output: Directory for the recordings.
        steps: Batches to train on in each run.
        seed: Seed of torch's, NumPy's and Python's generators.
        replicas: Perturbations of the training; see `traindiff.record(replica=...)`.
        repeat: Also run it a second time unchanged, which measures the machine's own noise.
        setup: Engine, dtype, ... of the run.
        timeout: Seconds that a run in its own processes may go without ending a step; see `verify`.
        progress: Called as the runs proceed.

    Returns:
        The baseline's recording, and the recordings for `traindiff.compare(noise=...)`.

    Raises:
        ConfigError: The recipe or the setup cannot be used, or the training fails, or does not repeat itself.
    """
    request = VerifyRequest(
        recipe=recipe, candidate=recipe, output=Path(output), baseline_setup=setup, setup=setup, steps=steps, seed=seed,
        repeat=repeat, replicas=replicas, timeout=timeout, progress=progress, asked_by="calibrate(...)",
    )  # fmt: skip
    request.check(None)
    runs = request.runs(request.output, None)
    runs.check(names_of_runs(replicas, repeat=repeat))
    with needed(runs):
        trusted = record_trusted(runs, request)
    return trusted.baseline, trusted.noise


def verify(
    recipe: Named,
    candidate: Named | None = None,
    output: str | os.PathLike[str] = OUTPUT,
    *,
    setup: Setup = PLAIN,
    baseline_setup: Setup | None = None,
    steps: int = STEPS,
    seed: int = 0,
    replicas: Sequence[str] = REPLICAS,
    repeat: bool = True,
    pin: Pin = "divergence",
    zoom: bool = False,
    rename: Mapping[str, str] | Sequence[str] | None = None,
    map: str | os.PathLike[str] | None = None,  # noqa: A002  as in the commands
    accept: str | os.PathLike[str] | None = None,
    ignore: str | Sequence[str] = (),
    rtol: float | None = None,
    atol: float | None = None,
    identical: bool = False,
    record: Mapping[str, Any] | None = None,
    compiler_logs: bool = False,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Verification:
    """Run a trusted training and the one in question, compare them against measured noise, and pin down the fault.

    If they diverge, the step is run again with every tensor of the candidate overwritten by the baseline's after it was
    recorded. Errors then neither accumulate nor cancel, and each operation is judged alone: natively, and if the
    training computes in a shorter dtype also in float32, in which smaller errors show.

    A recipe that is given by name (`"train.py:recipe"`) runs in fresh processes, one for each rank of its setup, and so
    does a function whose setup has an engine. Other functions run in this process. If a launcher (torchrun, deepspeed)
    has started several ranks, call this on all of them: rank 0 runs what has one rank, all run what has several, and
    all get the result.

    Args:
        recipe: Prepares the trusted training; called once per run, so it must be the same each time.
        candidate: Prepares the training in question; by default `recipe`.
        output: Directory for the recordings; those of an earlier call are replaced.
        setup: Engine, dtype, ... of the candidate.
        baseline_setup: The same for the trusted training; by default plain PyTorch with the same mathematics.
        steps: Batches to train on in each run.
        seed: Seed of torch's, NumPy's and Python's generators.
        replicas: Perturbations of the baseline that measure its noise; see `traindiff.record(replica=...)`.
        repeat: Also run the baseline a second time unchanged, and stop with an error if it does not repeat itself.
        pin: When to pin the fault down: on `divergence`, `always` (in the last step if the runs do not diverge),
            `never`.
        zoom: If a module is wrong alone, run that step once more and name the first operator inside it that differs.
        rename: See `traindiff.compare`.
        map: See `traindiff.compare`.
        accept: See `traindiff.compare`.
        ignore: See `traindiff.compare`.
        rtol: See `traindiff.compare`.
        atol: See `traindiff.compare`.
        identical: See `traindiff.compare`.
        record: Settings of `traindiff.record` for all runs; they override those of the recipes.
        compiler_logs: Gather what torch's compiler logs about the candidate.
        timeout: Seconds that a run in its own processes may go without ending a step. Seconds of computing count a
            tenth, and those in which the machine has no processor for it not at all. Default: 600 for the first step,
            then ten times the slowest step, but at least 60.
        progress: Called as the runs proceed.

    Returns:
        The comparison, what was pinned down, and what it cost. `incomplete` if the candidate failed.

    Raises:
        ConfigError: A recipe, setup or setting cannot be used, or the baseline fails or does not repeat itself.
    """
    request = VerifyRequest(
        recipe=recipe, candidate=recipe if candidate is None else candidate, output=Path(output),
        baseline_setup=trusted_way(setup) if baseline_setup is None else baseline_setup, setup=setup, steps=steps,
        seed=seed, repeat=repeat, replicas=replicas, pin=pin, zoom=zoom, rename=rename, map=map, accept=accept,
        ignore=ignore, rtol=rtol, atol=atol, identical=identical, record=record or {}, compiler_logs=compiler_logs,
        timeout=timeout, progress=progress,
    )  # fmt: skip
    ranks = PresentRanks.found()
    return ranks.together(lambda: run_request(request, ranks)) if ranks else run_request(request)


def run_request(request: VerifyRequest, ranks: PresentRanks | None = None) -> Verification:
    """Verify as requested, on the ranks that exist already, and leave the report beside the recordings.

    Raises:
        ConfigError: See `verify`.
    """
    request.check(ranks)
    request.refuse_same_training()
    runs = request.runs(request.output, ranks)
    refuse_others_files(request.output, (REPORT,), jsons=(JSON, INVESTIGATION), asked_by=request.asked_by)
    runs.check([*names_of_runs(request.replicas, repeat=request.repeat), "candidate"])
    runs.refuse_unusable(request.candidate, request.setup)  # now, not after all other runs
    return verified(runs, request, lambda: record_trusted(runs, request))


def verified(runs: Runs, request: VerifyRequest, trusted: Callable[[], Trusted]) -> Verification:
    """Verify against the baseline that `trusted` records, and leave the report beside the recordings.

    Raises:
        ConfigError: See `verify`. If a run of the baseline fails, the report with the ends of its ranks is written too.
    """
    with needed(runs):
        try:
            verification = verify_against(trusted(), request, runs)
        except RunFailedError as failed:
            write_files(without_baseline(failed.run, request, runs), runs.directory)
            raise
    write_files(verification, runs.directory)
    return verification
