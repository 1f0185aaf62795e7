"""`traindiff rerun`: run a saved call in longer dtypes, and say whether the dtype or the mathematics is at fault."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from traindiff.core.site import ROOT, printable
from traindiff.observe.torch.nonfinite.rerunning import Rerun, rerun
from traindiff.observe.torch.nonfinite.saved_call import load_call
from traindiff.observe.torch.nonfinite.trail import Made

Cause = Literal["dtype", "mathematics", "given", "not reproduced", "not run"]

EXIT_CODES: dict[Cause, int] = {"dtype": 0, "mathematics": 1, "given": 1, "not reproduced": 3, "not run": 3}

SCHEMA = "traindiff-rerun"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseReport:
    """The result of running a saved call again.

    Attributes:
        path: Canonical path of the module.
        module: Class of it.
        origin: What the watch said.
        native: The call in its own dtypes.
        float32: In float32.
        float64: In float64.
        cause: Of what is not finite: the `dtype`; the `mathematics`, which is not finite in float64 either; it was
            `given`; or it did not happen again.
        message: The same in a sentence, with numbers.
    """

    path: str
    module: str
    origin: str
    native: Rerun
    float32: Rerun
    float64: Rerun
    cause: Cause
    message: str

    @property
    def exit_code(self) -> int:
        """Of the command."""
        return EXIT_CODES[self.cause]

    def to_json(self) -> dict[str, Any]:
        """As `--json` prints it; see `traindiff explain watch`."""
        first = self.native.first_non_finite
        return {
            "schema": {"name": SCHEMA, "version": SCHEMA_VERSION},
            "site": self.path, "module": self.module, "origin": self.origin, "cause": self.cause,
            "message": self.message,
            "first_non_finite": None if first is None else {"position": first.position, "operator": first.name,
                                                            "backward": first.backward},
            "operators": [_row(position, self) for position in range(len(self.native.made))],
            "failed": [{"run": name, "message": run.failed} for name, run in self.runs().items() if run.failed],
        }  # fmt: skip

    def runs(self) -> dict[str, Rerun]:
        """The three runs by name."""
        return {"native": self.native, "float32": self.float32, "float64": self.float64}


def find_cause(directory: Path, *, device: str = "cpu") -> CauseReport:
    """Run a call that `traindiff.watch` has saved again.

    Raises:
        NotARecordingError: The directory holds none, or one that is not run.
        CorruptRecordingError: Its files are damaged.
    """
    call, content = load_call(directory)
    native, *others = (rerun(call, dtype, device) for dtype in (None, torch.float32, torch.float64))
    cause, message = _judged(native, *others)
    return CauseReport(
        path=content["path"] or ROOT, module=content["module"] or "", origin=content["origin"]["message"],
        native=native, float32=others[0], float64=others[1], cause=cause, message=message,
    )  # fmt: skip


def _judged(native: Rerun, float32: Rerun, float64: Rerun) -> tuple[Cause, str]:
    first = native.first_non_finite
    if native.given:
        return "given", f"What it was given is not finite already: {', '.join(native.given)}."
    if first is None:
        if native.failed:
            return "not run", f"It could not be run again: {native.failed}."
        return "not reproduced", (
            "What comes out is finite when it is run again. Other random masks may be the difference, a kernel that "
            "sums in another order, or an autograd function with a backward pass of its own, of which torch's is run "
            "here."
        )
    where = f"operator {first.position}, {first.name}{', backward' if first.backward else ''}"
    for longer in (float32, float64):
        if longer.dtype is None or torch.finfo(longer.dtype).bits <= torch.finfo(first.dtype).bits:
            continue
        same = same_in(longer, first)
        if same is not None and longer.first_non_finite is None and not longer.failed:
            limit = torch.finfo(first.dtype).max
            name, dtype = str(longer.dtype).removeprefix("torch."), str(first.dtype).removeprefix("torch.")
            largest = same.contents.largest
            above = f", above {dtype}'s {limit:.6g}" if largest > limit else ""
            return "dtype", (
                f"The overflow is {dtype}'s: {where} makes what is not finite; in {name} the largest is "
                f"{largest:.3g}{above}, and what comes out is finite."
            )
    if float64.failed:
        return "not run", f"{where} makes what is not finite; in float64 it could not be run: {float64.failed}."
    also = float64.first_non_finite
    if also is None:
        return "not reproduced", f"{where} makes what is not finite; in longer dtypes it computes something else."
    at = "there too" if also.position == first.position else f"first at operator {also.position}, {also.name}"
    of, instead = (
        ("an infinity that is a mask or a constant", "put a large finite number in its place")
        if first.of_infinity
        else ("finite numbers", "bound its inputs")
    )
    return "mathematics", (
        f"The mathematics is not finite: {where} makes NaN or infinity of {of}, in float64 {at}. "
        f"No longer dtype will help; {instead}."
    )


def same_in(run: Rerun, one: Made) -> Made | None:
    """The tensor of another run that the same operator made; None if the run did not get that far."""
    return next((other for other in run.made if (other.position, other.backward) == (one.position, one.backward)), None)


def _row(index: int, found: CauseReport) -> dict[str, Any]:
    one = found.native.made[index]
    row: dict[str, Any] = {"position": one.position, "operator": one.name, "backward": one.backward}
    for name, run in found.runs().items():
        other = run.made[index] if index < len(run.made) else None
        row[name] = None if other is None else {
            "dtype": str(other.dtype).removeprefix("torch."),
            "abs_min": _number(other.contents.smallest), "abs_max": _number(other.contents.largest),
            "nan": other.contents.num_nan, "inf": other.contents.num_inf,
        }  # fmt: skip
    return row


def _number(value: float) -> float | None:
    """JSON has no NaN: None stands for that of no finite element."""
    return None if value != value else value


def table(found: CauseReport) -> list[str]:
    """Lines of the report for people; what somebody else has saved may hold any names."""
    title = f"{found.path} {found.module}"
    head = f"{'':34}" + "".join(f"{name:>26}" for name in found.runs())
    columns = f"{'operator':34}" + f"{'abs min':>9} {'abs max':>9} {'NaN/inf':>6}" * 3
    lines = [title, f"  {found.origin}", "", head.rstrip(), columns]
    first = found.native.first_non_finite
    for index, one in enumerate(found.native.made):
        mark = "> " if one is first else "  "
        name = f"{mark}{one.position} {one.name.removeprefix('aten.')}{' grad' if one.backward else ''}"
        lines.append(f"{name:34}" + "".join(_cells(run, index) for run in found.runs().values()))
    lines += ["", found.message]
    lines += [f"{name}: {run.failed}." for name, run in found.runs().items() if run.failed]
    return [printable(line) for line in lines]


def _cells(run: Rerun, index: int) -> str:
    if index >= len(run.made):
        return f"{'-':>26}"
    one = run.made[index].contents
    bad = f"{one.num_nan}/{one.num_inf}" if not one.is_finite else "-"
    return f"{one.smallest:9.2e} {one.largest:9.2e} {bad:>6}"
