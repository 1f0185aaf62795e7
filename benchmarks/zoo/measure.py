"""What traindiff says of the trainings of the zoo: `python -m benchmarks.zoo.measure`. Writes benchmarks/ZOO.md.

Each training is recorded with three replicas. Each legal variation and each fault is compared with it: free (without
the replicas), calibrated (with them), and forced (the step of the fault, or the last step, run again with every tensor
overwritten by the baseline's after it was observed).

The whole zoo takes hours: with `--kept FILE`, what was measured is kept there, and is not measured again.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from io import StringIO
from itertools import product
from pathlib import Path
from time import perf_counter

import torch
from benchmarks.machine import machine
from benchmarks.zoo.faults import Fault, faults
from benchmarks.zoo.language import LANGUAGE
from benchmarks.zoo.legal import Variation, variations
from benchmarks.zoo.others import OTHERS
from benchmarks.zoo.recipe import Recipe
from benchmarks.zoo.vision import VISION
from rich.console import Console

import traindiff
from traindiff.analyse.compare import Comparison
from traindiff.errors import ConfigError
from traindiff.present.text.results import print_report
from traindiff.run.verify.pinning import NATIVE, ForcedSteps, pin_down
from traindiff.run.verify.request import VerifyRequest
from traindiff.run.verify.runs import REPLICAS, Runs

RESULTS = Path(__file__).parent.with_name("ZOO.md")
ZOO = {one.name: one for one in (*LANGUAGE, *VISION, *OTHERS)}
PRECISIONS = ("float32", "bfloat16", "autocast")
_MODES = ("free", "calibrated", "forced")
RIGHT = ("identical", "equivalent")
"""Verdicts of legal variations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was said of one variation or fault.

    Attributes:
        training: Name of the training.
        precision: Its precision.
        name: The variation or fault.
        is_fault: Which of both it is.
        mode: `free`, `calibrated` or `forced`.
        verdict: The word; `refused` where a mode does not apply, `error` where it failed.
        first: Step, phase and path of the first divergence; empty if there is none.
        located: Whether the first divergence is at the place of the fault.
        explained: Whether a sentence names the cause.
        ratio: Of the first divergence, or of a legal variation the largest of any site.
        text: What was said.
    """

    training: str
    precision: str
    name: str
    is_fault: bool
    mode: str
    verdict: str
    first: str = ""
    located: bool = False
    explained: bool = False
    ratio: float = 0.0
    text: str = field(default="", repr=False)

    @property
    def right(self) -> bool:
        """Whether a fault was found, or a variation was not flagged."""
        if self.verdict == "refused":
            return True
        return self.verdict not in (*RIGHT, "error") if self.is_fault else self.verdict in RIGHT

    def line(self) -> str:
        """As it is printed while it runs."""
        kind = "fault" if self.is_fault else "legal"
        mark = "  " if self.right and (not self.is_fault or (self.located and self.explained)) else "!!"
        missing = "" if not self.is_fault else f"{' ' if self.located else 'L'}{' ' if self.explained else 'E'}"
        return (
            f"{mark} {kind} {self.precision:8} {self.training:16} {self.name:20} {self.mode:10} {self.verdict:10} "
            f"{missing:2} {self.ratio:9.3g} {self.first}"
        )


@dataclass(slots=True)
class Bench:
    """A training that is recorded once, with its replicas, and compared with many.

    Attributes:
        recipe: The baseline.
        directory: Holds the recordings.
    """

    recipe: Recipe
    directory: Path
    _runs: Runs = field(init=False)
    _recorded: dict[str, str] = field(default_factory=dict)
    _forced: ForcedSteps | None = None

    def __post_init__(self) -> None:
        self._runs = Runs(directory=self.directory, seed=0, asked_by="zoo", record=self.recipe.record)

    def compare(self, candidate: Recipe, modes: Iterable[str], *, step: int) -> Iterator[tuple[str, Comparison | str]]:
        """A comparison by mode, or why there is none."""
        found: str | None = None
        for mode in modes:
            try:
                if mode == "forced":
                    if self._forced is None:
                        self._forced = ForcedSteps(self._runs, self.recipe)
                    request = VerifyRequest(recipe=self.recipe, candidate=candidate, output=self.directory)
                    yield mode, pin_down(self._runs, self._forced.step(step, NATIVE), request).comparison
                    continue
                if found is None:
                    found = self._runs.run(candidate, "candidate", num_steps=self.recipe.steps)
                noise = [self._recording(replica) for replica in REPLICAS] if mode == "calibrated" else []
                yield mode, traindiff.compare(self._recording(None), found, noise=noise)
            except ConfigError as error:
                yield mode, f"refused: {error}"
            except Exception:  # noqa: BLE001  what fails is an outcome
                yield mode, f"error: {traceback.format_exc()[-1500:]}"
            finally:
                torch.set_num_threads(1)

    def _recording(self, replica: str | None) -> str:
        """The baseline, or one of its replicas; recorded once."""
        name = replica.replace(":", "-") if replica else "baseline"
        if name not in self._recorded:
            self._recorded[name] = self._runs.run(self.recipe, name, num_steps=self.recipe.steps, replica=replica)
        return self._recorded[name]


def outcomes(
    recipe: Recipe, names: str, modes: Iterable[str], *, kinds: Iterable[str] = ("legal", "fault")
) -> Iterator[Outcome]:
    """All outcomes of a training, for the variations and faults whose name contains a text."""
    with tempfile.TemporaryDirectory(prefix="traindiff-zoo-") as here:
        bench = Bench(recipe, Path(here, "plain"))
        if "legal" in kinds:
            for name, variation in variations(recipe).items():
                if names in name:
                    step = recipe.steps - 1
                    wanted = [mode for mode in modes if mode != "forced" or not variation.restructured]
                    for mode, found in bench.compare(variation.change(recipe), wanted, step=step):
                        yield outcome(recipe, name, mode, found, variation)
        if "fault" in kinds:
            for name, fault in faults(recipe).items():
                if names in name:
                    base = fault.base(recipe)
                    own = bench if base is recipe else Bench(base, Path(here, name))
                    step = min(fault.place.steps[0], recipe.steps - 1)
                    for mode, found in own.compare(fault.change(base), modes, step=step):
                        yield outcome(recipe, name, mode, found, fault)


def outcome(recipe: Recipe, name: str, mode: str, found: Comparison | str, of: Fault | Variation) -> Outcome:
    """What a comparison says of a variation or fault."""
    is_fault = isinstance(of, Fault)
    if isinstance(found, str):
        verdict = found.partition(":")[0]
        return Outcome(
            training=recipe.name, precision=recipe.precision, name=name, is_fault=is_fault, mode=mode, verdict=verdict,
            located=verdict == "refused", explained=verdict == "refused", text=found,
        )  # fmt: skip
    first, text = found.first_divergence, said(found)
    ratios = [row.ratio for row in found.differences if row.ratio < float("inf")]
    return Outcome(
        training=recipe.name, precision=recipe.precision, name=name, is_fault=is_fault, mode=mode,
        verdict=found.verdict, first=f"step {first.step} {first.phase} {first.path or '(model)'}" if first else "",
        located=is_fault and first is not None and of.place.located(first.step, first.phase, first.path),
        explained=is_fault and of.place.explained(text),
        ratio=first.ratio if first else max(ratios, default=0.0), text=text,
    )  # fmt: skip


def said(comparison: Comparison) -> str:
    """What `traindiff compare` prints."""
    console = Console(file=StringIO(), width=160, color_system=None)
    print_report(console, comparison, top=10)
    file: StringIO = console.file
    return file.getvalue()


def measured(
    training: str, precision: str, names: str, kinds: str, modes: tuple[str, ...]
) -> tuple[float, list[Outcome]]:
    """The outcomes of one training in one precision, in a process of its own; and the seconds it took."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    began = perf_counter()
    with redirect_stderr(StringIO()):
        found = list(outcomes(ZOO[training].but(precision=precision), names, modes, kinds=kinds.split(",")))
    return perf_counter() - began, found


def main() -> None:
    """Measure, print, and write ZOO.md if no training and no precision was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", default=",".join(ZOO), help="names of trainings, separated by commas")
    parser.add_argument("--only", default="", help="variations and faults whose name contains this")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--modes", default=",".join(_MODES))
    parser.add_argument("--kinds", default="legal,fault")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--kept", type=Path, help="a file (JSON lines, gzip) of what was measured; not measured again")
    parser.add_argument("--texts", type=Path, help="a file for what was said, where it is not right")
    given = parser.parse_args()
    modes = given.modes.split(",")
    kept = _kept(given.kept)
    found: list[Outcome] = []
    seconds, left = 0.0, {}
    for training, precision in product(given.trainings.split(","), given.precisions.split(",")):
        part = (training, precision, given.only, given.kinds)
        taken, before = kept.get(part, (0.0, {}))
        found += [one for mode in modes for one in before.get(mode, ())]
        seconds += taken
        left[part] = tuple(mode for mode in modes if mode not in before)
    left = {part: missing for part, missing in left.items() if missing}
    with ProcessPoolExecutor(given.workers) as pool:
        jobs = {pool.submit(measured, *part, missing): (part, missing) for part, missing in left.items()}
        for number, job in enumerate(as_completed(jobs), 1):
            taken, measured_now = job.result()
            found += measured_now
            seconds += taken
            if given.kept:
                short = [asdict(replace(one, text="")) for one in measured_now]
                with gzip.open(given.kept, "at", encoding="utf-8") as file:
                    print(json.dumps([*jobs[job], taken, short]), file=file)
            print(f"{number} of {len(left)}, {taken:.0f} s", flush=True)
            for one in measured_now:
                print(one.line(), flush=True)
                if given.texts and one.line().startswith("!!"):
                    with given.texts.open("a", encoding="utf-8") as file:
                        file.write(f"{one.line()}\n\n{one.text}\n\n{'=' * 80}\n")
    page = report(found, seconds=seconds)
    print(page)
    whole = ("trainings", "only", "precisions", "kinds")  # the table says which modes
    if all(getattr(given, name) == parser.get_default(name) for name in whole):
        RESULTS.write_text(page, encoding="utf-8")


def _kept(file: Path | None) -> dict[tuple[str, ...], tuple[float, dict[str, list[Outcome]]]]:
    """What was measured before, by the first arguments of `measured`: seconds, and by mode the outcomes."""
    kept: dict[tuple[str, ...], tuple[float, dict[str, list[Outcome]]]] = {}
    lines = gzip.decompress(file.read_bytes()).decode().splitlines() if file and file.exists() else []
    for line in lines:
        part, modes, taken, outcomes_of_part = json.loads(line)
        seconds, by_mode = kept.get(tuple(part), (0.0, {}))
        by_mode |= {mode: [Outcome(**one) for one in outcomes_of_part if one["mode"] == mode] for mode in modes}
        kept[tuple(part)] = seconds + taken, by_mode
    return kept


def report(found: list[Outcome], *, seconds: float) -> str:
    """The page."""
    trainings = {one.training for one in found}
    lines = [
        "# The zoo: what traindiff says of trainings of other people's design",
        "",
        f"Written by `make zoo` on {datetime.now(UTC):%Y-%m-%d}. {machine()}. {len(trainings)} trainings, "
        f"{len(found):,} comparisons, {seconds:.0f} s of one core.",
        "",
        "| precision | mode | legal variations | false alarms | faults | found | located | explained |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for precision in PRECISIONS:
        for mode in _MODES:
            these = [
                one for one in found
                if (one.precision, one.mode) == (precision, mode) and one.verdict != "refused"
            ]  # fmt: skip
            legal, wrong = [one for one in these if not one.is_fault], [one for one in these if one.is_fault]
            if these:
                lines.append(
                    f"| {precision} | {mode} | {len(legal)} | {sum(not one.right for one in legal)} | {len(wrong)} "
                    f"| {sum(one.right for one in wrong)} | {sum(one.located for one in wrong)} "
                    f"| {sum(one.explained for one in wrong)} |"
                )
    for title, chosen in (
        ("False alarms", [one for one in found if not one.is_fault and not one.right]),
        ("Not found", [one for one in found if one.is_fault and not one.right]),
        ("Found, but not located", [one for one in found if one.is_fault and one.right and not one.located]),
        ("Located, but not explained", [one for one in found if one.is_fault and one.located and not one.explained]),
    ):
        lines += ["", f"## {title}: {len(chosen)}", ""]
        if chosen:
            lines += ["| training | precision | what | mode | verdict | first divergence |", "| --- " * 6 + "|"]
            lines += [
                f"| {one.training} | {one.precision} | {one.name} | {one.mode} | {one.verdict} | {one.first} |"
                for one in chosen
            ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
