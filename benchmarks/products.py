"""How exact the products of the zoo's trainings are: `python -m benchmarks.products [TRAINING ...]`.

Each training runs in three precisions, with `observe="products"` in every step, bit for bit beside the same training
without a recording. A row says how many products were checked, and the errors furthest from what their formats allow:
of a whole product, and of one row. All trainings are right: a finding is a false alarm.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import torch
from benchmarks.zoo.measure import PRECISIONS, ZOO
from benchmarks.zoo.recipe import Precision, Recipe

import traindiff


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """What was found in one training.

    Attributes:
        num_products: Number of products.
        num_unchecked: Number of calls whose products are inside a kernel.
        whole: The largest error of a product, in units of what its format allows.
        row: The largest error of a row.
        findings: Messages of findings and warnings.
        same_bits: Whether the training has computed the same bits as without a recording.
        cost: Processor time of all steps, relative to that of the training without a recording.
    """

    num_products: int
    num_unchecked: int
    whole: float
    row: float
    findings: tuple[str, ...]
    same_bits: bool
    cost: float


def run(recipe: Recipe, path: Path | None) -> tuple[list[torch.Tensor], float]:
    """The parameters after the training, and its processor time in seconds; recorded if there is a path."""
    training = recipe()
    optimizer = training.optimizer

    def steps() -> None:
        for batch in training.batches:
            training.step(batch)

    begin = process_time()
    if path is None:
        steps()
    else:
        settings = {**recipe.record, "observe": ["products"]}
        with traindiff.record(path, training.model, optimizer, strict=True, **settings):
            steps()
    return [parameter.detach().clone() for parameter in training.model.parameters()], process_time() - begin


def exactness(recipe: Recipe) -> Exactness:
    """Run a training with and without the check of its products."""
    with tempfile.TemporaryDirectory(prefix="traindiff-products-") as here:
        plain, seconds = run(recipe, None)
        path = Path(here, "run")
        recorded, seconds_recorded = run(recipe, path)
        verdict = traindiff.check(path, rules="product-wrong,product-inaccurate")
    table = verdict.products
    assert table is not None
    return Exactness(
        num_products=sum(row.num_products for row in table),
        num_unchecked=sum(one.count for one in table.unchecked),
        whole=max((row.ratio for row in table), default=0.0),
        row=max((row.residual for row in table), default=0.0),
        findings=tuple(one.message for one in (*verdict.findings, *verdict.warnings)),
        same_bits=all(torch.equal(one, other) for one, other in zip(plain, recorded, strict=True)),
        cost=seconds_recorded / seconds,
    )


def main() -> None:
    """Print a row for each training and precision, then what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trainings", nargs="*", default=list(ZOO))
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("| training | precision | products | not checked | whole | row | findings | same bits | time |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |")
    for name in parser.parse_args().trainings:
        for precision in PRECISIONS:
            recipe = ZOO[name].but(precision=_precision(precision))
            found = exactness(recipe)
            cells = (
                name, precision, found.num_products, found.num_unchecked, f"{found.whole:.2f}", f"{found.row:.2f}",
                len(found.findings), "yes" if found.same_bits else "NO", f"{found.cost:.1f}",
            )  # fmt: skip
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            for message in found.findings:
                print(f"    {message}", flush=True)


def _precision(name: str) -> Precision:
    if name not in ("float32", "bfloat16", "autocast"):
        raise ValueError(name)
    return name


if __name__ == "__main__":
    main()
