"""Pin a fault down: run one step again with tensors forced to the baseline's, so that each operation is isolated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from traindiff.analyse.compare import Pinned, compare
from traindiff.analyse.findings import Finding, more_text
from traindiff.analyse.merge.renames import parse_renames
from traindiff.errors import ConfigError
from traindiff.run.config.setup import PLAIN, Setup
from traindiff.run.verify.failed import RunFailedError
from traindiff.run.verify.recipe import Named
from traindiff.run.verify.request import VerifyRequest
from traindiff.run.verify.runs import REPLICAS, Runs
from traindiff.storage import open_recording

NATIVE = "native"

_SHORTER = frozenset({"bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedStep:
    """One step of the trusted training: its tensors, and how rounding in them changes the results of its operations.

    Attributes:
        step: The step.
        precision: Dtype in which everything is computed, e.g. `float32`; `native` for the training's own dtypes.
        operators: Glob over modules whose operators are recorded; empty for none.
        baseline: Recording with all tensors of this step and the one before.
        noise: Recordings of replicas that were forced to these tensors.
    """

    step: int
    precision: str = NATIVE
    operators: str = ""
    baseline: str = ""
    noise: tuple[str, ...] = ()

    @property
    def directory(self) -> str:
        """The directory of its recordings."""
        return f"{'zoomed' if self.operators else 'pinned'}-step-{self.step}-{self.precision}"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of each run.

        The step before is recorded too, because it ends with the state before this step. So is what follows in the same
        batch: of several optimizers, the first to step ends the recorded step, and others step after it.
        """
        dtype = None if self.precision == NATIVE else getattr(torch, self.precision)
        steps = f"{max(0, self.step - 1)}-{self.step + 1}"
        zoomed = {"operators": self.operators} if self.operators else {}
        return {"num_steps": self.step + 1, "precision": dtype, "steps": steps, **zoomed}


def why_not_forced(setup: Setup) -> str:
    """Why this setup does not support teacher forcing; empty if it does."""
    if setup.compile or setup.deepcompile:
        return "what compiled code computes cannot be replaced on the way. Verify the same without compile."
    if setup.engine == "deepspeed":
        return "DeepSpeed keeps gradients and master weights in flat buffers of its own."
    if setup.engine == "pp":
        return "stages of a pipeline hand on tensors before they could be replaced."
    return ""


def precisions(baseline: str) -> Iterator[str]:
    """The precisions in which to repeat a step: native, and float32 if the training computes in something shorter."""
    yield NATIVE
    recording = open_recording(baseline)
    step = next(recording.steps(recording.ranks[0]), None)
    if step is not None and any(seen.dtype in _SHORTER for seen in step.observations):
        yield "float32"


class ForcedSteps:
    """Steps of a trusted training to which candidates can be forced, each recorded when it is first needed.

    In another dtype than the training's own, only those of its `replicas` that round are used.
    """

    def __init__(self, runs: Runs, recipe: Named, *, setup: Setup = PLAIN, replicas: Sequence[str] = REPLICAS) -> None:
        self._runs = runs
        self._recipe = recipe
        self._setup = setup
        self._replicas = replicas
        self._recorded: dict[ForcedStep, ForcedStep] = {}

    def step(self, step: int, precision: str, *, operators: str = "") -> ForcedStep:
        """The step to which candidates are forced; see `ForcedStep`.

        Raises:
            ConfigError: The recipe cannot be used.
            RunFailedError: The training failed.
        """
        asked = ForcedStep(step=step, precision=precision, operators=operators)
        if asked not in self._recorded:
            self._recorded[asked] = self._record(asked)
        return self._recorded[asked]

    def _record(self, plain: ForcedStep) -> ForcedStep:
        directory = plain.directory
        settings = {**plain.settings, "setup": self._setup}
        baseline = self._runs.run(self._recipe, f"{directory}/baseline", detail="tensors", **settings)
        used = [one for one in self._replicas if plain.precision == NATIVE or one.startswith("ulp")]
        noise = [
            self._runs.run(
                self._recipe, f"{directory}/{one.replace(':', '-')}", replica=one, forced_by=baseline, **settings
            )
            for one in used
        ]
        return replace(plain, baseline=baseline, noise=tuple(noise))


def pin_down(runs: Runs, given: ForcedStep, request: VerifyRequest, *, operators: str = "") -> Pinned:
    """Run the step of the candidate, and overwrite each tensor with the baseline's after it was observed.

    Errors then neither accumulate nor cancel, so every finding is wrong by itself. `operators` is the candidate's name
    of the modules whose operators are recorded.

    Raises:
        ConfigError: The recipe cannot be used.
        RunFailedError: The training failed.
    """
    settings = {**given.settings, **({"operators": operators} if operators else {})}
    found = runs.run(
        request.candidate, f"{given.directory}/candidate", setup=request.setup, forced_by=given.baseline, **settings
    )
    steps = f"{given.step}-{given.step + 1}"
    comparison = compare(given.baseline, found, noise=given.noise, steps=steps, **request.alignment)
    return Pinned(step=given.step, precision=given.precision, comparison=comparison)


EVERYWHERE = "*"


def zoom_in(
    pinned: Sequence[Pinned], request: VerifyRequest, runs: Runs, forced: ForcedSteps
) -> tuple[Pinned | None, str]:
    """Record the operators of the first pinned step in which something is wrong.

    Returns:
        The step with its operators, or None and the reason.
    """
    wrong = next((one for one in pinned if _zoomable(one)), None)
    if wrong is None:
        return None, f"No operators were recorded: {_nothing_to_zoom(pinned)}"
    if request.baseline_setup.nproc != request.setup.nproc:
        return None, (
            f"No operators were recorded: the baseline has {request.baseline_setup.nproc} and the candidate "
            f"{request.setup.nproc} ranks, and operators are compared rank by rank."
        )
    if why := why_not_forced(request.setup):
        return None, f"No operators were recorded: {why}"
    found: Pinned | None = None
    for patterns in _modules(_zoomable(wrong)[0], wrong, request.rename):
        try:
            given = forced.step(wrong.step, wrong.precision, operators=patterns[0])
            found = pin_down(runs, given, request, operators=patterns[1])
        except ConfigError as error:
            problem = error.problems[0]
            return found, f"No operators could be recorded: {problem.where} {problem.what} {problem.fix}"
        except RunFailedError as error:
            return found, f"No operators could be recorded: the run {error.run.run} failed. {error.run.message}"
        if any(zoom.cause in ("operator", "other-operators") for zoom in found.comparison.zooms):
            break
    return found, ""


def _nothing_to_zoom(pinned: Sequence[Pinned]) -> str:
    """The reason why no module's operators would show what is wrong."""
    found = [finding for one in pinned for finding in one.comparison.findings]
    if not found:
        return "given the baseline's tensors, no module is wrong alone."
    first = found[0]
    where = f"the {first.phase} of {first.site}{more_text(len(found) - 1, 'site')}"
    return f"an operator of a module computes nothing of what is wrong alone ({where})."


def _zoomable(pinned: Pinned) -> list[Finding]:
    found = [one for one in pinned.comparison.findings if one.phase in ("forward", "backward", "grad")]
    return [one for one in found if one.kind not in ("missing", "extra")]


def _modules(
    finding: Finding, pinned: Pinned, rename: Mapping[str, str] | Sequence[str] | None
) -> list[tuple[str, str]]:
    """Patterns in baseline and candidate for the modules that may have caused the difference, likelier ones first.

    A module's output depends on the code of the modules around it, from the last site before it that agrees. The
    gradient that comes back to an output comes from the consumer of that output, which may be anywhere.
    """
    everywhere = (EVERYWHERE, EVERYWHERE)
    if finding.phase == "backward":
        return [everywhere]
    path = finding.path
    if finding.phase == "grad":
        path = path.rpartition(".")[0]
    elif after := str(finding.evidence.get("after") or ""):
        path = _common(path, after.rpartition(" ")[0])
    renamed = parse_renames(rename)
    modules = (_paths(pinned.comparison.baseline), _paths(pinned.comparison.candidate))
    other = next((one for one in modules[1] if renamed(one) == path), None)
    if not path or path not in modules[0] or other is None:
        return [everywhere]
    return [(path, other), everywhere]


def _common(path: str, other: str) -> str:
    """The innermost module that contains both, or is one of them; empty for the root."""
    common = []
    for one, two in zip(path.split("."), other.split("."), strict=False):
        if one != two:
            break
        common.append(one)
    return ".".join(common)


def _paths(recording: str) -> list[str]:
    opened = open_recording(recording)
    return [path for rank in opened.ranks for path in opened.rank_content(rank).get("modules", {})]
