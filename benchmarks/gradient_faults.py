"""Faults in single gradients of the zoo, found without a baseline: `python -m benchmarks.gradient_faults`.

Writes benchmarks/GRADIENTS.md. Each training is recorded with the witness, alone. In one step one gradient is made
wrong in memory, where no counter of torch sees it, as a faulty kernel or reduction would. `traindiff check` reads this
one recording. A fault is found exactly if the first finding names its step and its parameter. Its size is that of the
change, in multiples of what rounding explains for this gradient (`allowed` in `traindiff.analyse.merge.witnessed`).

Each training, and each legal variation of it, is also checked as it is: any finding of the witness is a false alarm.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from datetime import UTC, datetime
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

import torch
from benchmarks.machine import machine
from benchmarks.zoo.faults import AT, middle_weight
from benchmarks.zoo.legal import is_cuttable, variations
from benchmarks.zoo.measure import PRECISIONS, ZOO
from benchmarks.zoo.recipe import Now, Recipe
from tests.on_ranks import run_on_ranks
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import traindiff
from traindiff.analyse.check import Verdict
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.merge.witnessed import witnessed
from traindiff.storage import open_recording

RESULTS = Path(__file__).with_name("GRADIENTS.md")
OBSERVED = ("loss", "grad", "witness")
RULES = "wrong-gradient,lost-contribution,product-wrong,product-inaccurate,bit-flip"
LEAST = 4.0
"""Multiples of what rounding explains from which on a fault shall be found."""

RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was said of one training.

    Attributes:
        training: Name of the training.
        precision: Its precision.
        name: Its fault, or its legal variation.
        is_fault: Which of both it is.
        size: Of the fault, in multiples of what rounding explains.
        found: Whether there is a finding.
        exact: Whether the first finding names step and parameter.
        said: The first finding.
    """

    training: str
    precision: str
    name: str
    is_fault: bool
    size: float = 0.0
    found: bool = False
    exact: bool = False
    said: str = ""


@dataclass(slots=True)
class Wrong:
    """Makes one gradient wrong in one step, and keeps by how much it changed."""

    path: str
    change: Callable[[Tensor, Tensor], Tensor]
    before: Tensor | None = None
    norm: float = 0.0

    def __call__(self, now: Now) -> None:
        """Change the gradient of the step, of which that of the step before is known."""
        gradient = now.model.get_parameter(self.path).grad
        if gradient is None:
            return
        if now.step == AT:
            self.write(gradient, self.change(gradient, gradient if self.before is None else self.before))
        self.before = gradient.clone()

    def write(self, gradient: Tensor, wrong: Tensor) -> None:
        """Write to memory."""
        wrong = wrong.to(gradient.dtype)
        self.norm = float((wrong.double() - gradient.double()).norm())
        gradient.data.copy_(wrong)


def one_element(gradient: Tensor, _: Tensor) -> Tensor:
    """The largest element is another one; more than one of its bits."""
    wrong = gradient.clone()
    place = int(wrong.abs().argmax())
    wrong.view(-1)[place] *= -1.7
    return wrong


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "doubled": lambda gradient, _: gradient * 2,
    "stale": lambda _, before: before,
    "1 % too large": lambda gradient, _: gradient * 1.01,
    "one element": one_element,
}


class LosesMicroBatch:
    """A step in which one parameter does not get what the second of three micro-batches gives."""

    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong

    def __call__(self, now: Now) -> None:
        """As `plain_step`."""
        for number, (part, share) in enumerate(now.parts()):
            parameter = now.model.get_parameter(self.wrong.path)
            before = None if parameter.grad is None else parameter.grad.clone()
            (now.loss(part) * share).backward()
            if (now.step, number) == (AT, 1) and before is not None and parameter.grad is not None:
                self.wrong.write(parameter.grad, before)
        now.clip()
        now.optimizers[0].step()
        now.recipe.after_step(now)
        now.recipe.zero_grad(now)


def record(recipe: Recipe, path: Path) -> None:
    """Train once, with the witness."""
    training = recipe()
    settings: dict[str, Any] = {**recipe.record, "observe": OBSERVED}
    with traindiff.record(path, training.model, training.optimizer, **settings):
        for now in training.batches:
            training.step(now)


def check(path: Path) -> Verdict:
    """What the rules of the witness say."""
    return traindiff.check(path, rules=RULES)


def judged(recipe: Recipe, path: Path, name: str, site: str, norm: float) -> Outcome:
    """The outcome of a training with a fault."""
    found = (*check(path).findings, *check(path).warnings)
    explained = [
        one.allowed
        for step in run_steps(open_recording(str(path))) if step.step == AT
        for one in witnessed(step.table) if one.entry.key.path == site
    ]  # fmt: skip
    return Outcome(
        training=recipe.name, precision=recipe.precision, name=name, is_fault=True, found=bool(found),
        size=norm / explained[0] if explained else float("nan"),
        exact=bool(found) and (found[0].step, found[0].path) == (AT, site), said=found[0].message if found else "",
    )  # fmt: skip


def legal(recipe: Recipe) -> Iterator[Outcome]:
    """The training and its legal variations."""
    for name, one in variations(recipe).items():
        with tempfile.TemporaryDirectory(prefix="traindiff-gradients-") as here:
            record(one.change(recipe), Path(here, "run"))
            verdict = check(Path(here, "run"))
        found = (*verdict.findings, *verdict.warnings)
        yield Outcome(
            training=recipe.name, precision=recipe.precision, name=name, is_fault=False, found=bool(found),
            said=found[0].message if found else "",
        )  # fmt: skip


def wrong(recipe: Recipe) -> Iterator[Outcome]:
    """The training with each fault."""
    model = recipe.build()
    path = middle_weight(model)
    if recipe.name == "gan" and path.startswith("generator"):
        path = "discriminator.0.weight"
    made: dict[str, tuple[Recipe, Wrong]] = {}
    for name, change in CHANGES.items():
        fault = Wrong(path, change)
        made[name] = recipe.but(after_backward=fault), fault
    if is_cuttable(recipe, model) and recipe.name not in ("lbfgs", "gan", "sam"):
        fault = Wrong(path, lambda gradient, _: gradient)
        made["lost micro-batch"] = recipe.but(micro_batches=(0.25, 0.5, 0.25), step=LosesMicroBatch(fault)), fault
    for name, (candidate, fault) in made.items():
        with tempfile.TemporaryDirectory(prefix="traindiff-gradients-") as here:
            record(candidate, Path(here, "run"))
            if fault.norm > 0.0:
                yield judged(recipe, Path(here, "run"), name, path, fault.norm)


def train_on_rank(training: str, precision: Any, site: str, directory: str) -> float:
    """Train under DistributedDataParallel; in one step the reduction of one gradient loses rank 1."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    recipe = ZOO[training].but(precision=precision)
    made = recipe()
    assert isinstance(made.model, nn.Module)
    module = made.model
    model = DistributedDataParallel(module)
    norm = 0.0
    with traindiff.record(Path(directory), model, made.optimizer, **{**recipe.record, "observe": OBSERVED}):
        for now in made.batches:
            rank, number = distributed.get_rank(), distributed.get_world_size()
            batch = {name: one.tensor_split(number)[rank] for name, one in now.batch.items()}
            parameter = module.get_parameter(site)
            own: Tensor | None = None
            if now.step == AT:  # what rank 0 contributes alone
                with now.autocast():
                    loss = recipe.loss(module, batch)
                (own,) = torch.autograd.grad(loss, [parameter])
            with now.autocast():
                loss = recipe.loss(model, batch)
            loss.backward()
            if own is not None and parameter.grad is not None:
                distributed.broadcast(own, 0)
                fault = Wrong(site, lambda gradient, _: gradient)
                fault.write(parameter.grad, own / number)
                norm = fault.norm
            now.model = model
            now.clip()
            now.optimizers[0].step()
            now.recipe.zero_grad(now)
    return norm


def lost_rank(recipe: Recipe) -> Iterator[Outcome]:
    """The training on two ranks, with one rank's gradient lost."""
    model = recipe.build()
    if not is_cuttable(recipe, model) or recipe.name in ("lbfgs", "gan", "sam", "averaging"):
        return
    site = middle_weight(model)
    with tempfile.TemporaryDirectory(prefix="traindiff-gradients-") as here:
        norms = run_on_ranks(train_on_rank, RANKS, recipe.name, recipe.precision, site, f"{here}/run")
        yield judged(recipe, Path(here, "run"), "lost rank", site, norms[0])


PARTS: dict[str, Callable[[Recipe], Iterator[Outcome]]] = {"faults": wrong, "rank": lost_rank, "legal": legal}


def report(outcomes: Sequence[Outcome], failed: Sequence[str]) -> str:
    """The page."""
    lines = [
        "# Gradients of the zoo, witnessed",
        "",
        f"Written by `python -m benchmarks.gradient_faults` on {datetime.now(UTC):%Y-%m-%d}. {machine()}.",
        f"{len({one.training for one in outcomes})} trainings; one recording each, with `observe`: "
        + ", ".join(f"`{one}`" for one in OBSERVED) + ". The weight in the middle of the model gets a",
        f"wrong gradient in step {AT}. *Exact*: the first finding names this step and this parameter.",
        "",
        f"| precision | fault | trainings | found | exact | above {LEAST:.0f} roundings | found | exact |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    for precision in PRECISIONS:
        mine = [one for one in outcomes if one.precision == precision and one.is_fault]
        for name in [*dict.fromkeys(one.name for one in mine), "all"]:
            these = [one for one in mine if name in (one.name, "all")]
            large = [one for one in these if not one.size <= LEAST]
            cells = [
                sum(getattr(one, what) for one in group) if what else len(group)
                for group in (these, large) for what in ("", "found", "exact")
            ]  # fmt: skip
            lines.append(f"| {precision} | {name} | {' | '.join(map(str, cells))} |")
    right = [one for one in outcomes if not one.is_fault]
    alarms = [one for one in right if one.found]
    lines += ["", f"Legal trainings and variations: {len(right)}. False alarms: {len(alarms)}."]
    missed = [one for one in outcomes if one.is_fault and not one.exact and not one.size <= LEAST]
    for title, chosen in (("False alarms", alarms), ("Above 4 roundings, and not found exactly", missed)):
        lines += ["", f"## {title}: {len(chosen)}", *([""] if chosen else [])]
        lines += [
            f"* {one.training}, {one.precision}, {one.name} ({one.size:.3g} roundings): {one.said or 'not found'}"
            for one in chosen
        ]
    if failed:
        lines += ["", "## Not measured", "", *(f"* {one}" for one in failed)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure, print, and write GRADIENTS.md if nothing was left out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trainings", default=",".join(ZOO))
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--parts", default=",".join(PARTS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes: list[Outcome] = []
    failed: list[str] = []
    for part, name, precision in product(
        given.parts.split(","), given.trainings.split(","), given.precisions.split(",")
    ):
        recipe = ZOO[name].but(precision=precision)
        try:
            with redirect_stderr(StringIO()):
                for one in PARTS[part](recipe):
                    outcomes.append(one)
                    print(one, flush=True)
        except Exception as error:  # noqa: BLE001  what fails is said on the page
            failed.append(f"{name}, {precision}, {part}: {type(error).__name__}: {str(error).splitlines()[0]}")
            print(f"{failed[-1]}\n{traceback.format_exc()[-1500:]}", flush=True)
    page = report(outcomes, failed)
    print(page)
    if all(getattr(given, one) == parser.get_default(one) for one in ("trainings", "precisions", "parts")):
        RESULTS.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
