"""The checks of `traindiff doctor`, one function each."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

import torch

from traindiff.core.kernels import cpu_kernel_in_use
from traindiff.core.site import canonical_paths
from traindiff.core.tap_registry import OBSERVED_BY_DEFAULT
from traindiff.core.torch_compat.compiling import compiled_code_ran
from traindiff.run.config.training import Training
from traindiff.run.doctor.timing import interleaved
from traindiff.run.doctor.training import (
    explain,
    first_difference,
    largest_distance,
    prepare,
    recorded,
    returning_modules,
    train,
)
from traindiff.run.verify.recipe import Recipe
from traindiff.storage import open_recording

Result = Literal["pass", "fail", "skip"]
Slot = tuple[str, str, str, str, int]
"""Phase, stage, path, slot and call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check; `skip` if it was not possible, or not asked for."""

    name: str
    result: Result
    message: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The checks to run, and their duration.

    Attributes:
        recipe: Prepares the training.
        steps: Steps of each training whose bits are compared.
        rounds: Pairs of steps that are timed; 0 times nothing.
        backend: Backend of `torch.compile`; None skips the compiled checks.
    """

    recipe: Recipe
    steps: int = 3
    rounds: int = 9
    backend: str | None = "aot_eager"


def run_checks(plan: Plan) -> Iterator[Check]:
    """Run all checks one by one. Leaves nothing behind except torch's random state, which it seeds."""
    yield _kernel()
    with tempfile.TemporaryDirectory(prefix="traindiff-doctor-") as directory:
        where = Path(directory)
        yield from _equality(plan, where / "eager", backend=None)
        yield _guarded("every slot is written", lambda: _slots(plan, where / "eager"))
        if plan.backend is None:
            yield Check(name="compiled", result="skip", message="not asked for (--compiled)")
        else:
            yield from _equality(plan, where / "compiled", backend=plan.backend)
            yield _guarded(
                "every slot is written, compiled", lambda: _compiled_slots(where / "eager", where / "compiled")
            )
        yield _guarded("overhead", lambda: _overhead(plan, where / "timed"))


_WITHOUT_ACTIVATIONS = tuple(name for name in OBSERVED_BY_DEFAULT if name not in ("forward", "backward"))

_NOT_COMPILED = (
    "torch compiled nothing: compile() of a module that torch.nn defines, such as nn.Sequential, has no effect; put it "
    "into a module of your own"
)

_ONLY_ACTIVATIONS = (
    ": the compiler arranges operators in another way if activations are observed. With "
    f"record(observe={list(_WITHOUT_ACTIVATIONS)}) all bits are the same; see `traindiff explain compile`"
)

_ALWAYS = ", and also if no activations are observed"


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # noqa: BLE001  whatever it is, the other checks go on
        return Check(name=name, result="fail", message=explain(error))


def _kernel() -> Check:
    name, why = cpu_kernel_in_use()
    return Check(name="kernel", result="skip" if why else "pass", message=why or name, evidence={"kernel": name})


def _equality(plan: Plan, path: Path, *, backend: str | None) -> Iterator[Check]:
    kind = "" if backend is None else f", compiled with {backend}"
    name = f"same bits with and without a recording{kind}"

    def check() -> Check:
        plain, again = (train(plan.recipe, steps=plan.steps, backend=backend, path=None) for _ in range(2))
        if backend is not None and not compiled_code_ran():
            return Check(name=name, result="skip", message=_NOT_COMPILED)
        recorded = train(plan.recipe, steps=plan.steps, backend=backend, path=path)
        if (by_itself := first_difference(again, plain)) is not None:
            message = f"two trainings without a recording differ, first in {by_itself}, so this cannot be told"
            return Check(name=name, result="skip", message=message)
        if (differs := first_difference(recorded, plain)) is not None:
            size = largest_distance(recorded, plain)
            message = f"with a recording, {differs} differs (at most by {size:.1e} of the L2 norm of a tensor)"
            if backend is not None:
                where = path.with_name(f"{path.name}-without-activations")
                without = train(
                    plan.recipe, steps=plan.steps, backend=backend, path=where, observe=_WITHOUT_ACTIVATIONS
                )
                message += _ONLY_ACTIVATIONS if first_difference(without, plain) is None else _ALWAYS
            return Check(name=name, result="fail", message=message, evidence={"difference": size})
        message = f"{len(plain)} losses, gradients, parameters and random states of {plan.steps} steps"
        return Check(name=name, result="pass", message=message, evidence={"tensors": len(plain)})

    yield _guarded(name, check)


def _slots(plan: Plan, path: Path) -> Check:
    name = "every slot is written"
    if not _is_recorded(path):
        return _nothing_to_look_at(name)
    found = _written(path)
    paths = {canonical for _, canonical in canonical_paths(returning_modules(plan.recipe)).items()}
    modules = {slot[2] for slot in found if slot[0] == "forward"}
    content = open_recording(str(path)).rank_content(0)
    trained = {path for path, one in content["parameters"].items() if one["requires_grad"]}
    gradients = {slot[2] for slot in found if slot[0] == "grad"}
    missing = [*sorted(paths - modules), *sorted(trained - gradients)]
    return _presence(name, found, missing)


def _compiled_slots(eager: Path, compiled: Path) -> Check:
    name = "every slot is written, compiled"
    if not _is_recorded(eager) or not _is_recorded(compiled):
        return _nothing_to_look_at(name)
    expected, found = _written(eager), _written(compiled)
    missing = sorted(f"{slot[2] or '(root)'} {slot[3]}" for slot in expected.keys() - found.keys() if not slot[1])
    return _presence(name, found, missing)


def _is_recorded(path: Path) -> bool:
    """True if an earlier check started a recording."""
    return (path / "run.json").exists()


def _nothing_to_look_at(name: str) -> Check:
    return Check(name=name, result="skip", message="there is no recording to look at")


def _presence(name: str, found: dict[Slot, str], missing: list[str]) -> Check:
    unobserved = {f"{slot[2] or '(root)'} {slot[3]}": why for slot, why in found.items() if why}
    evidence = {"slots": len(found), "missing": missing, "unobserved": unobserved}
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        message = f"not written: {', '.join(missing[:3])}{more}"
        return Check(name=name, result="fail", message=message, evidence=evidence)
    message = f"{len(found)} in a step"
    if unobserved:
        site, why = next(iter(unobserved.items()))
        message += f", {len(unobserved)} of them as not observed, with the reason; first {site}: {why}"
    return Check(name=name, result="pass", message=message, evidence=evidence)


def _written(path: Path) -> dict[Slot, str]:
    """For each slot of the last recorded step, why it was not observed; empty if it was.

    Raises:
        FileNotFoundError: Nothing was recorded.
    """
    steps = list(open_recording(str(path)).steps(0))
    if not steps:
        raise FileNotFoundError("the recording holds no step")
    last = steps[-1]
    return {(one.phase, one.stage, one.path, one.slot, one.call): one.unobserved for one in last.observations}


def _overhead(plan: Plan, path: Path) -> Check:
    if plan.rounds < 2:
        return Check(name="overhead", result="skip", message="not asked for (--rounds)")
    plain, watched = (prepare(plan.recipe, backend=None) for _ in range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting threads would use CPU time too
    try:
        step_plain, step_watched = _stepping(plain), _stepping(watched)
        with recorded(watched, path):
            for _ in range(2):
                step_plain()
                step_watched()
            ratio = interleaved(step_plain, step_watched, rounds=plan.rounds)
    finally:
        torch.set_num_threads(threads)
    message = (
        f"roughly {ratio.median:.2f} times the CPU time ({ratio.low:.2f} to {ratio.high:.2f}; {ratio.rounds} pairs of "
        f"steps of {1000 * ratio.baseline_seconds:.0f} ms, one thread)"
    )
    evidence = {
        "ratio": ratio.median, "low": ratio.low, "high": ratio.high, "rounds": ratio.rounds,
        "step_seconds": ratio.baseline_seconds,
    }  # fmt: skip
    return Check(name="overhead", result="pass", message=message, evidence=evidence)


def _stepping(training: Training) -> Callable[[], None]:
    """A function that trains on the next batch, and after the last one on the first again."""
    batches = cycle(training.batches)

    def step() -> None:
        training.train_on(next(batches))

    return step
