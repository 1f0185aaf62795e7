"""Silent data corruption: flip bits at random places of a training, and see what `traindiff check` finds.

`python -m benchmarks.corruption` writes benchmarks/CORRUPTION.md. As in arXiv 2604.00726, one bit of one element flips,
once in a training, at a random step: in a parameter (between two steps, between the forward and the backward pass, or
before the optimizer), in the state of the optimizer, in an activation, in what a matrix product returns, or in a
gradient. There is no baseline: each training is recorded by itself, and
checked.

Flips count by how much they change: in roundings of the element (`|change| / (u |element|)`), and as a part of the norm
of the tensor.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks import corruption_on_ranks as on_ranks
from benchmarks.corruption_flips import LEAST, OBSERVED, STEPS, VOCABULARY, WIDTH, Flip, batch, flipped
from benchmarks.gpt import GPT
from benchmarks.machine import machine
from tests.on_ranks import run_on_ranks
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import traindiff

RESULTS = Path(__file__).with_name("CORRUPTION.md")
REDUCTIONS = """
Reductions are those of two ranks of gloo. *One copy*: what one rank has received of an all-reduce of
DistributedDataParallel; ranks are compared bit by bit, so every flip is found. *All copies*: all ranks receive the
same wrong sum, as after a flip in one rank's part. *Reduce-scatter*: the part that one rank of FSDP2 receives,
which no other rank has. The identity of the witness is one number for each probe of the whole gradient, so it sees
only what changes the gradient by more than its rounding: with it alone, 75 to 81 % of the last two were found in
float32, and 31 % in bfloat16. `wrong-sum` holds the 64 numbers of a gradient's sketch against those of what ranks
contributed, which differ by the rounding of one addition of a 64th of the elements. What bounds it: a flip in an
element that is much smaller than the largest one may be less than what rounding the largest one loses. In bfloat16,
100 roundings are 0.4 of an element. The rank of a reduce-scatter is seldom named: contributions have sketches of
whole gradients, not of parts.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What `check` said of a training with a flipped bit."""

    kind: str
    flip: Flip
    found: bool
    at_step: bool
    at_site: bool
    at_rank: bool


class _InProduct(TorchDispatchMode):
    """Flips a bit of what one matrix product returns."""

    def __init__(self, number: int, flip: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._left, self._flip = number, flip

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _PRODUCTS:
            if self._left == 0:
                self._flip(found)
            self._left -= 1
        return found


_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})


class Injection:
    """Flips one bit while a training runs; one object for each training."""

    def __init__(self, kind: str, seed: int, model: nn.Module) -> None:
        self.kind = kind
        self.flip: Flip | None = None
        self._generator = torch.Generator().manual_seed(1_000_003 * (seed + 1))
        self._step = 1 + int(torch.randint(STEPS - 2, (), generator=self._generator))
        names = [name for name, one in model.named_parameters() if one.numel() > 1]
        self._parameter = self._one_of(names)
        leaves = [name for name, one in model.named_modules() if isinstance(one, (nn.Linear, nn.LayerNorm, nn.GELU))]
        self._module = self._one_of(leaves)
        self._product = int(torch.randint(27, (), generator=self._generator))

    def _one_of(self, names: list[str]) -> str:
        return names[int(torch.randint(len(names), (), generator=self._generator))]

    def _do(self, tensor: Tensor, site: str, step: int) -> None:
        if self.flip is None:
            self.flip = flipped(tensor, self._generator, step=step, site=site)

    @contextmanager
    def during(self, step: int, model: nn.Module) -> Iterator[None]:
        """Around the forward and the backward pass of a step."""
        with ExitStack() as undo:
            if step == self._step and self.kind == "activation":
                module = model.get_submodule(self._module)
                hook = module.register_forward_hook(lambda *call: self._do(call[2], self._module, step))
                undo.callback(hook.remove)
            if step == self._step and self.kind == "product":
                undo.enter_context(_InProduct(self._product, partial(self._do, site="", step=step)))
            yield

    def after_forward(self, step: int, model: nn.Module) -> None:
        """Between the forward and the backward pass."""
        if step == self._step and self.kind == "parameter, before backward":
            self._do(model.get_parameter(self._parameter).data, self._parameter, step)

    def before_step(self, step: int, model: nn.Module) -> None:
        """Between the backward pass and the optimizer."""
        parameter = model.get_parameter(self._parameter)
        if step == self._step and self.kind == "gradient" and parameter.grad is not None:
            self._do(parameter.grad, self._parameter, step)
        elif step == self._step and self.kind == "parameter, before its update":
            self._do(parameter.data, self._parameter, step)

    def after_step(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """After the optimizer."""
        if step != self._step:
            return
        parameter = model.get_parameter(self._parameter)
        if self.kind == "parameter":
            self._do(parameter.data, self._parameter, step + 1)
        elif self.kind in ("exp_avg", "exp_avg_sq"):
            self._do(optimizer.state[parameter][self.kind], self._parameter, step + 1)


KINDS = (
    "parameter", "parameter, before backward", "parameter, before its update",
    "exp_avg", "exp_avg_sq", "activation", "product", "gradient",
)  # fmt: skip


def train(path: Path, kind: str, seed: int, *, dtype: torch.dtype = torch.float32) -> Flip | None:
    """Train and record a small GPT, in which one bit flips; None if none did."""
    torch.manual_seed(seed)
    model = GPT(2, width=WIDTH, vocabulary=VOCABULARY).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    injection = Injection(kind, seed, model)
    data = torch.Generator().manual_seed(seed)
    with traindiff.record(path, model, optimizer, observe=OBSERVED):
        for step in range(STEPS):
            tokens = batch(data)
            with injection.during(step, model):
                logits = model(tokens[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
                injection.after_forward(step, model)
                loss.backward()
            injection.before_step(step, model)
            optimizer.step()
            injection.after_step(step, model, optimizer)
            optimizer.zero_grad()
    return injection.flip


def healthy_kinds(seed: int, dtype: torch.dtype) -> frozenset[str]:
    """Kinds of findings without a flip: updates in pure bfloat16 are truly rounded away."""
    with tempfile.TemporaryDirectory(prefix="traindiff-corruption-") as directory:
        train(Path(directory, "run"), "none", seed, dtype=dtype)
        verdict = traindiff.check(Path(directory, "run"))
    return frozenset(one.kind for one in (*verdict.findings, *verdict.warnings))


def outcome(kind: str, seed: int, *, dtype: torch.dtype, known: frozenset[str]) -> Outcome | None:
    """What `check` says of one training, beside findings of some kinds."""
    with tempfile.TemporaryDirectory(prefix="traindiff-corruption-") as directory:
        flip = train(Path(directory, "run"), kind, seed, dtype=dtype)
        return None if flip is None else judged(kind, flip, Path(directory, "run"), known)


def judged(kind: str, flip: Flip, path: Path, known: frozenset[str]) -> Outcome:
    """What `check` says of a recording."""
    verdict = traindiff.check(path)
    found = [one for one in (*verdict.findings, *verdict.warnings) if one.kind not in known]
    here = [one for one in found if one.step == flip.step]
    sites = [one for one in here if not flip.site or flip.site in one.path or flip.site in one.message]
    return Outcome(
        kind=kind, flip=flip, found=bool(found), at_step=bool(here), at_site=bool(sites),
        at_rank=any(flip.rank in (None, one.rank) or f"rank {flip.rank}" in one.message for one in sites),
    )  # fmt: skip


def outcomes_on_ranks(kinds: Sequence[str], count: int, dtype: str) -> Iterator[Outcome]:
    """The outcomes of trainings on two ranks."""
    with tempfile.TemporaryDirectory(prefix="traindiff-corruption-") as directory:
        known: list[frozenset[str]] = []
        for kind in ("none", *kinds):
            flips = run_on_ranks(
                on_ranks.train_all,
                on_ranks.RANKS,
                f"{directory}/{kind}",
                kind,
                count,
                dtype,
                timeout_seconds=60.0 * count,
            )[0]
            for seed, flip in enumerate(flips):
                path = Path(directory, kind, str(seed))
                if kind == "none":
                    verdict = traindiff.check(path)
                    known.append(frozenset(one.kind for one in (*verdict.findings, *verdict.warnings)))
                elif flip is not None:
                    yield judged(kind, Flip(**flip), path, known[seed])


def report(outcomes: list[Outcome], healthy: dict[str, tuple[int, list[str]]], *, dtypes: dict[int, str]) -> str:
    """The page."""
    lines = [
        "# Silent data corruption: bits that flip, found without a baseline",
        "",
        f"Written by `python -m benchmarks.corruption` on {datetime.now(UTC):%Y-%m-%d}. {machine()}.",
        "",
        "One bit of one element flips in a training of a small GPT (2 layers, width 64, AdamW, 5 steps), so that the",
        f"element changes by at least {LEAST:.0f} of its roundings. `traindiff check` sees one recording, with",
        "`observe`: " + ", ".join(f"`{one}`" for one in OBSERVED) + ".",
        "Those in reductions are on two ranks of gloo: in what one rank has received of an all-reduce, in the sum that",
        "all ranks receive, and in a part of a reduce-scatter of FSDP2.",
        "*Large* flips change the tensor by at least a thousandth of its norm.",
        "",
        "| dtype | what flips | flips | found | at the step | at the site | on the rank "
        "| large flips | found | at the step | at the site | on the rank |",
        "| --- | --- " + "| ---: " * 10 + "|",
    ]
    for dtype in dict.fromkeys(dtypes.values()):
        mine = [one for one in outcomes if dtypes[id(one)] == dtype]
        for kind in (*KINDS, *on_ranks.KINDS, "all"):
            these = [one for one in mine if kind in (one.kind, "all")]
            large = [one for one in these if one.flip.share >= 1e-3]
            cells = [
                f"{sum(getattr(one, name) for one in group) / max(1, len(group)):.0%}"
                if name else str(len(group))
                for group in (these, large)
                for name in ("", "found", "at_step", "at_site", "at_rank")
            ]  # fmt: skip
            if not these:
                continue
            lines.append(f"| {dtype} | {kind} | {' | '.join(cells)} |")
    lines += ["", "Kinds of findings in the same trainings without a flip; they are not counted above:", ""]
    lines += [
        f"* {dtype}, {count} trainings: {', '.join(kinds) or 'none'}" for dtype, (count, kinds) in healthy.items()
    ]
    return "\n".join(lines) + "\n\n" + REDUCTIONS


def main() -> None:
    """Measure, print, and write CORRUPTION.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50, help="trainings for each kind of flip and each dtype")
    parser.add_argument("--kinds", default=";".join((*KINDS, *on_ranks.KINDS)), help="separated by semicolons")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    outcomes: list[Outcome] = []
    dtypes: dict[int, str] = {}
    healthy: dict[str, tuple[int, list[str]]] = {}
    for name in given.dtypes.split(","):
        dtype = getattr(torch, name)
        without = [healthy_kinds(seed, dtype) for seed in range(given.count)]
        healthy[name] = given.count, sorted(frozenset().union(*without))
        chosen = given.kinds.split(";")
        some: list[Outcome] = []
        if reduced := [kind for kind in chosen if kind in on_ranks.KINDS]:
            some += outcomes_on_ranks(reduced, given.count, name)
        for kind in [kind for kind in chosen if kind in KINDS]:
            for seed in range(given.count):
                one = outcome(kind, seed, dtype=dtype, known=without[seed])
                if one is not None:
                    some.append(one)
                    print(name, one, flush=True)
        outcomes += some
        dtypes |= dict.fromkeys(map(id, some), name)
    page = report(outcomes, healthy, dtypes=dtypes)
    print(page)
    if given.kinds == parser.get_default("kinds") and given.dtypes == parser.get_default("dtypes"):
        RESULTS.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
