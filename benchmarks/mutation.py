"""Whether the tests notice when the code is changed: `make mutation`. Writes benchmarks/MUTATION.md.

Mutants (one number, comparison, condition or operator changed) of the packages that judge recordings, a part of all
there are, are each given to the tests that run the changed line. What no test notices is not checked, or changes
nothing. A run takes about half an hour of two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

from benchmarks.machine import machine
from benchmarks.mutants import Mutant, sample, unchanged
from benchmarks.mutation_tests import NO_TESTS, Measured, check_order, import_once, measure, start

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("MUTATION.md")
CODE = ("analyse", "core/summary.py")
"""The judging code: files and folders of src/traindiff."""

TESTS = ("analyse", "core/test_summary.py")
"""Its tests: files and folders of tests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a mutant.

    Attributes:
        mutant: The change.
        survived: Whether no test noticed.
        num_tests: Tests that run the line.
    """

    mutant: Mutant
    survived: bool
    num_tests: int


def main() -> None:
    """Measure, print, and write MUTATION.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, help=f"files or folders; default: src/traindiff/{CODE}")
    parser.add_argument("--tests", nargs="*", help=f"default: tests/{TESTS}")
    parser.add_argument("--share", type=float, default=0.02, help="of all mutants; default: 0.02")
    parser.add_argument("--after", type=float, default=0.0, help="leave out what this share would take; default: 0")
    parser.add_argument("--longest", type=float, default=1.0, help="seconds; longer tests are left out; default: 1")
    parser.add_argument("--most", type=int, help="tests of one mutant, the fastest; default: all that run its line")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--json", type=Path, help="file for the outcomes; MUTATION.md is left as it is then")
    options = parser.parse_args()
    os.chdir(ROOT)
    source = ROOT / "src" / "traindiff"
    paths = [path.resolve() for path in options.paths] or [source / name for name in CODE]
    tests = options.tests or [f"tests/{name}" for name in TESTS]
    began = perf_counter()
    mutants, num_places = sample(_files(paths), options.share, after=options.after)
    random.Random(0).shuffle(mutants)  # what is printed first is a sample, too
    import_once()
    measured = measure(tests, source).without_longer(options.longest)
    check_order(measured, unchanged(mutants[0].path), _module(mutants[0].path))
    outcomes = []
    for outcome in tried(mutants, measured, workers=options.workers, most=options.most):
        outcomes.append(outcome)
        said = "NOT NOTICED" if outcome.survived else "noticed"
        print(
            f"{len(outcomes)} of {len(mutants)}: {_place(outcome.mutant)} {said} by {outcome.num_tests} tests: "
            f"{outcome.mutant.after}",
            flush=True,
        )
    outcomes.sort(key=lambda one: (one.mutant.path, one.mutant.line, one.mutant.after))
    text = report(outcomes, num_places, tests=tests, seconds=perf_counter() - began, longest=options.longest)
    print(text)
    if options.json:
        options.json.write_text(json.dumps([_to_json(one) for one in outcomes], indent=1), encoding="utf-8")
    else:
        RESULTS.write_text(text, encoding="utf-8")


def tried(mutants: Sequence[Mutant], measured: Measured, *, workers: int, most: int | None) -> Iterator[Outcome]:
    """What becomes of each mutant, in the order in which it is known."""
    running: dict[int, tuple[Mutant, int]] = {}
    waiting = list(mutants)[::-1]
    while waiting or running:
        while waiting and len(running) < workers:
            mutant = waiting.pop()
            tests = measured.of(mutant, most)
            if tests:
                seconds = sum(measured.seconds[test] for test in tests)
                running[start(mutant, tests, _module(mutant.path), seconds=seconds)] = mutant, len(tests)
            else:
                yield Outcome(mutant=mutant, survived=True, num_tests=0)
        if running:
            process, status = os.wait()
            mutant, num_tests = running.pop(process)
            code = os.waitstatus_to_exitcode(status)
            assert code != NO_TESTS
            yield Outcome(mutant=mutant, survived=code == 0, num_tests=num_tests)


def report(
    outcomes: Sequence[Outcome], num_places: dict[Path, int], *, tests: Sequence[str], seconds: float, longest: float
) -> str:
    """The page."""
    survivors = [one for one in outcomes if one.survived]
    killed = len(outcomes) - len(survivors)
    text = f"""# Whether the tests notice when the code is changed

Written by `make mutation` on {datetime.now(UTC):%Y-%m-%d}. {machine()}. {seconds:.0f} s.

**{killed} of {len(outcomes)} mutants are noticed: {killed / max(1, len(outcomes)):.1%}.** They are a sample of the
{sum(num_places.values())} changes that cosmic-ray's operators, and four of our own, make in the files below: a number
higher or lower by one, a comparison, a condition or an operator turned into another, a loop without a turn, None in
place of a result. Each was given to those tests of {", ".join(tests)} that run its line and take at most {longest:g} s;
it is noticed if one of them fails, or does not end. Not noticed are also changes that change nothing.

| file | changes | tried | noticed | | run by no test |
| --- | --- | --- | --- | --- | --- |"""
    lines = text.splitlines()
    all_of, left, unseen = (
        Counter(one.mutant.path for one in of) for of in (outcomes, survivors, [o for o in outcomes if not o.num_tests])
    )
    for path in sorted(all_of):
        share = 1 - left[path] / all_of[path]
        lines.append(
            f"| {_named(path)} | {num_places[path]} | {all_of[path]} | {all_of[path] - left[path]} | {share:.0%} "
            f"| {unseen[path]} |"
        )
    lines += ["", "## Not noticed", ""]
    for outcome in survivors:
        mutant = outcome.mutant
        lines += [f"* {_place(mutant)}{'' if outcome.num_tests else ', run by no test'}", "  ```diff"]
        lines += [f"  - {mutant.before}", f"  + {mutant.after}", "  ```"]
    return "\n".join([*lines, ""])


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def _module(path: Path) -> str:
    names = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT / "src" / "traindiff"))


def _place(mutant: Mutant) -> str:
    return f"{_named(mutant.path)}:{mutant.line}"


def _to_json(outcome: Outcome) -> dict[str, object]:
    mutant = outcome.mutant
    return {
        "path": _named(mutant.path),
        "line": mutant.line,
        "before": mutant.before,
        "after": mutant.after,
        "survived": outcome.survived,
        "num_tests": outcome.num_tests,
    }


if __name__ == "__main__":
    main()
