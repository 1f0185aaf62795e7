"""What traindiff finds, and what it must not: `make faults`. Prints tables and writes them into benchmarks/FAULTS.md.

Faults and legal variations of tests/faults, in a small GPT, a ConvNet with BatchNorm and an LSTM, each held against a
baseline that was recorded with three replicas: once with both runs free, and once with one step of the candidate
forced to the baseline's tensors. Run it as a module, from the root of the repository.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from time import perf_counter

import torch
from benchmarks.fault_outcomes import Case, Outcome
from benchmarks.fault_tables import alarms_table, faults_table, legal_table, missed_table, summary_table
from benchmarks.machine import machine
from tests.faults.further_faults import FURTHER_FAULTS
from tests.faults.injected import FAULTS, Fault
from tests.faults.laboratory import STEPS, Laboratory
from tests.faults.recipe import Recipe, recipe, runs_here
from tests.faults.rewritten import REPRESENTATION, rewritten
from tests.faults.variations import variations

from traindiff import ConfigError, open_recording, verify
from traindiff.analyse.compare import Comparison
from traindiff.core.summary import distance, norm

RESULTS = Path(__file__).with_name("FAULTS.md")
ALL_FAULTS = {**FAULTS, **FURTHER_FAULTS}
TRAININGS = (("gpt", "adamw"), ("conv", "sgd"), ("lstm", "adam"))
PRECISIONS = ("float32", "bfloat16", "autocast")
"""Parameters and computation in float32, or in bfloat16; float32 parameters under autocast to bfloat16."""

WRITTEN = PRECISIONS[:2]
"""What is measured, and written, where no precision is asked for."""


def main() -> None:
    """Measure, print, and write FAULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name contains this; nothing is written then")
    parser.add_argument(
        "--precision", choices=PRECISIONS, action="append", help="default: all; else nothing is written"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    options = parser.parse_args()
    began = perf_counter()
    groups: dict[Recipe, list[Case]] = defaultdict(list)
    for case in cases(options.precision or WRITTEN):
        if options.only in case.name:
            groups[baseline_of(case)].append(case)
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(options.workers) as pool:
        for future in as_completed([pool.submit(measure, part) for group in groups.values() for part in parts(group)]):
            outcomes += future.result()
            for outcome in future.result():
                print(line(outcome), flush=True)
    order = {case: number for number, case in enumerate(case for group in groups.values() for case in group)}
    outcomes.sort(key=lambda one: (PRECISIONS.index(one.case.precision), order[one.case]))
    text = report(outcomes, seconds=perf_counter() - began, workers=options.workers)
    print(text)
    if not options.only and not options.precision:
        RESULTS.write_text(text, encoding="utf-8")


def report(outcomes: list[Outcome], *, seconds: float, workers: int) -> str:
    """The page."""
    num_faults = len({one.case.name for one in outcomes if one.case.fault})
    num_legal = len({one.case.name for one in outcomes if not one.case.fault})
    head = f"""# What traindiff finds, and what it does not

Written by `make faults` on {datetime.now(UTC):%Y-%m-%d}. {machine()}.
{num_faults} faults, {num_legal} kinds of legal variation, {seconds:.0f} s, {workers} at a time, each on one thread.

The faults and the variations are those of tests/faults, in a GPT of two blocks (AdamW), a ConvNet with BatchNorm (SGD
with momentum) and an LSTM (Adam), over {STEPS} steps. *free*: both runs train on their own, and floors are measured
from three replicas (ulp:1, ulp:2, reorder:1). *forced*: the step of the fault, or the last step of legal variations,
run again with every tensor of the candidate overwritten by the baseline's after it was observed; *in float32*: with
everything computed in float32. *located exactly*: the first divergence names step, phase and path of the fault. A
ratio is a difference over its floor; the margin is that of the weakest located fault over that of the worst legal
variation. *bfloat16*: parameters and computation. The *effect* of a fault is measured
in the float32 training, forced: the relative difference of the tensor at its place (of an update: relative to the
parameter). It is above one rounding where it exceeds u, 2^-8 for bfloat16; what is located counts as such, and what
changes no bit of the free run does not.
"""
    sections = {
        "": summary_table(outcomes),
        "Not located": missed_table(outcomes),
        "False alarms": alarms_table(outcomes),
        "What it costs": costs(),
        "Every fault": faults_table(outcomes),
        "Every legal variation": legal_table(outcomes),
    }
    lines = [head]
    for name, body in sections.items():
        lines += [f"## {name}", ""] if name else []
        lines += [*body, ""]
    return "\n".join(lines)


def costs() -> Iterator[str]:
    """What one verification takes, each in a process of its own."""
    yield "`traindiff.verify` of a doubled gradient, 4 steps, all defaults, beside the plain training:"
    yield ""
    yield "| model | precision | runs | steps in all | training | in all | plain training | peak memory |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for model, optimizer in TRAININGS:
        for precision in ("float32", "bfloat16"):
            with ProcessPoolExecutor(1) as pool:
                yield pool.submit(cost_of, model, optimizer, precision).result()


def cost_of(model: str, optimizer: str, precision: str) -> str:
    """One line of the table of costs."""
    torch.set_num_threads(1)
    right = recipe(model, optimizer, precision).but(steps=4)  # type: ignore[arg-type]
    wrong = right.but(after_backward=lambda now: next(now.model.parameters()).grad.mul_(2.0))
    with tempfile.TemporaryDirectory() as directory:
        right.run(Path(directory) / "warm")  # compiles the kernel
        began = perf_counter()
        training = right()
        for batch in training.batches:
            training.step(batch)
        plain = perf_counter() - began
        began = perf_counter()
        found = verify(right, wrong, Path(directory) / "runs")
        whole = perf_counter() - began
    steps, seconds = sum(run.num_steps for run in found.costs), sum(run.seconds for run in found.costs)
    return (
        f"| {model} | {precision} | {len(found.costs)} | {steps} | {seconds:.1f} s | {whole:.1f} s | {plain:.2f} s "
        f"| {found.peak_bytes / 1e6:.0f} MB |"
    )


def baseline_of(case: Case) -> Recipe:
    """The right training."""
    if case.fault:
        return ALL_FAULTS[case.name].baseline(case.precision)
    return recipe(case.model, case.optimizer, case.precision).but(steps=6)  # type: ignore[arg-type]


def cases(precisions: Iterable[str]) -> Iterator[Case]:
    """All faults and all legal variations, in each precision."""
    for precision in precisions:
        for name, fault in ALL_FAULTS.items():
            if fault.model != "mlp" and runs_here(fault.model, precision):
                yield Case(name=name, precision=precision, model=fault.model, optimizer=fault.optimizer, fault=True)
        for model, optimizer in TRAININGS:
            if not runs_here(model, precision):
                continue
            names = {**variations(model, optimizer, precision), **rewritten(model), **REPRESENTATION[model]}
            for name in names:
                yield Case(name=name, precision=precision, model=model, optimizer=optimizer, fault=False)


def parts(group: list[Case]) -> Iterator[list[Case]]:
    """Parts of a group that keep all processes busy; each records the baseline anew."""
    for first in range(0, len(group), 16):
        yield group[first : first + 16]


def measure(group: list[Case]) -> list[Outcome]:
    """The outcomes of cases that share a baseline."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as directory:
        laboratory = Laboratory(Path(directory))
        return [
            outcome
            for case in group
            for outcome in (of_fault(laboratory, case) if case.fault else of_variation(laboratory, case))
        ]


def modes(precision: str) -> dict[str, torch.dtype | None]:
    """Ways to run a step again, forced."""
    native: dict[str, torch.dtype | None] = {"forced": None}
    return native if precision == "float32" else {**native, "forced, in float32": torch.float32}


def of_fault(laboratory: Laboratory, case: Case) -> Iterator[Outcome]:
    """A fault, free and forced."""
    fault, baseline = ALL_FAULTS[case.name], baseline_of(case)
    candidate = fault.change(baseline)
    yield fault_outcome(case, fault, "free", laboratory.free(baseline, candidate))
    for mode, precision in modes(case.precision).items():
        comparison = laboratory.forced(baseline, candidate, step=fault.step, precision=precision)
        found = fault_outcome(case, fault, mode, comparison)
        share = share_of_parameter(comparison.baseline, fault) if fault.phase == "update" else 1.0
        yield replace(found, effect=found.effect * share)


def fault_outcome(case: Case, fault: Fault, mode: str, comparison: Comparison) -> Outcome:
    """What was said of a fault."""
    first = comparison.first_divergence
    place = fault.place
    located = first is not None and (first.step, first.phase, first.path) == place
    there = [
        row.difference
        for row in comparison.differences
        if (row.step, row.phase, row.path) == place and isfinite(row.difference)
    ]
    return Outcome(
        case=case, mode=mode, place=named(*place), verdict=comparison.verdict, located=located, right=located,
        said=named(first.step, first.phase, first.path) if first else "",
        ratio=first.ratio if first else 0.0, where=first.site if first else "", effect=max(there, default=0.0),
    )  # fmt: skip


def share_of_parameter(recording: str, fault: Fault) -> float:
    """Norm of the baseline's update over that of the parameter, to whose rounding it is stored."""
    run = open_recording(recording)
    values = [
        step.summaries[row]
        for step in run.steps(run.ranks[0])
        for row, seen in enumerate(step.observations)
        if (seen.phase, seen.path, seen.slot) == ("param", fault.path, "value") and seen.step <= fault.step
    ]
    return float(distance(values[-2], values[-1])) / float(norm(values[-1]))


def of_variation(laboratory: Laboratory, case: Case) -> Iterator[Outcome]:
    """A legal variation, free and, in its last step, forced."""
    changed = {
        **variations(case.model, case.optimizer, case.precision),
        **rewritten(case.model),
        **REPRESENTATION[case.model],
    }[case.name]
    baseline = baseline_of(case)
    permuted = case.name in REPRESENTATION[case.model]
    yield variation_outcome(case, "free", laboratory.free(baseline, changed(baseline)), permuted=permuted)
    if permuted:
        return  # verify does not force what is equivalent, and there is nothing to force it to
    for mode, precision in modes(case.precision).items():
        try:
            comparison = laboratory.forced(baseline, changed(baseline), step=STEPS - 1, precision=precision)
        except ConfigError:  # compiled
            yield Outcome(
                case=case, mode=mode, place="", verdict="refused", said="", located=False, ratio=0.0, where="",
                effect=0.0, right=True,
            )  # fmt: skip
        else:
            yield variation_outcome(case, mode, comparison, permuted=False)


def variation_outcome(case: Case, mode: str, comparison: Comparison, *, permuted: bool) -> Outcome:
    """What was said of a legal variation."""
    first = comparison.first_divergence
    # What is in another order differs by its whole size, and is judged by its norm.
    rows = [] if permuted else comparison.differences
    worst = max(rows, key=lambda row: row.ratio if row.ratio < inf or first else 0.0, default=None)
    right = comparison.verdict in ("identical", "equivalent") and bool(comparison.representation) == permuted
    return Outcome(
        case=case, mode=mode, place="", verdict=comparison.verdict, located=False, right=right,
        said=named(first.step, first.phase, first.path) if first else "",
        ratio=worst.ratio if worst else 0.0,
        where=f"{worst.phase} of {worst.path} {worst.slot}" if worst else "", effect=0.0,
    )  # fmt: skip


def named(step: int, phase: str, path: str) -> str:
    """A place, in words."""
    return f"step {step}, {phase} of {path or 'the model'}"


def line(outcome: Outcome) -> str:
    """One line while it runs."""
    case = outcome.case
    kind = "fault" if case.fault else "legal"
    mark = "  " if outcome.right else "!!"
    return (
        f"{mark} {kind} {case.precision:9} {case.model:4} {case.name:36} {outcome.mode:18} {outcome.verdict:10} "
        f"{outcome.ratio:9.3g} {outcome.said or outcome.where} {outcome.effect:.2g}"
    )


if __name__ == "__main__":
    main()
