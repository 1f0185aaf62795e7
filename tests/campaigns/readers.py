"""Everything that reads other people's files, called as a program would, in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from traceback import walk_tb
from typing import Any

from tests.campaigns.mutating import Kind
from tests.campaigns.places import Places
from traindiff.analyse.check import Verdict, check
from traindiff.analyse.compare import Comparison, compare
from traindiff.compat.msprobe.exporting import export_gradients
from traindiff.compat.msprobe.importing import import_gradients
from traindiff.compat.onnxruntime.importing import import_statistics
from traindiff.errors import RecordingError
from traindiff.present.data import FORMATS, observations, writer
from traindiff.present.data.exports import scalars
from traindiff.present.page import page_of, write
from traindiff.present.text.recording import print_head, print_rows
from traindiff.present.text.results import print_report
from traindiff.present.viewer.catalog import Catalog
from traindiff.present.viewer.listing import Listing
from traindiff.run.testing.golden import Golden
from traindiff.storage import Recording, open_recording


@dataclass(frozen=True, slots=True)
class Case:
    """What a reader is given.

    Attributes:
        places: The mutant, and everything beside it.
        seed: Name of what the mutant was made of.
        rng: Chooses between ways to read it.
    """

    places: Places
    seed: str
    rng: Random

    @property
    def mutant(self) -> str:
        """Path of the mutant."""
        return str(self.places.mutant)

    @property
    def clean(self) -> str:
        """Path of what it was made of."""
        return str(self.places.clean(self.seed))


def _read(case: Case) -> None:
    recording = open_recording(case.mutant)
    assert isinstance(recording.missing_ranks, tuple)
    for rank in recording.ranks:
        recording.rank_content(rank)
        recording.status(rank)
        _read_steps(recording, rank)


def _read_steps(recording: Recording, rank: int) -> None:
    for step in recording.steps(rank):
        for row in range(len(step.observations)):
            recording.tensors(step, row)


def _show(case: Case) -> None:
    recording = open_recording(case.mutant)
    wanted = observations.Filter(site=case.rng.choice(("*", "fc*", "* grad")), samples=True)
    form = case.rng.randrange(4)
    if form == 0:
        observations.write_csv(observations.rows(recording, wanted), io.StringIO())
    elif form == 1:
        observations.write_json(observations.rows(recording, wanted), io.StringIO(), recording=recording)
    elif form == 2:
        observations.write_parquet(observations.rows(recording, wanted), io.BytesIO())
    else:
        console = _console()
        print_head(console, recording)
        rows = observations.rows(recording, wanted)
        print_rows(console, rows, rest=rows, recorded=True)


def _console() -> Any:
    from rich.console import Console

    return Console(file=io.StringIO(), width=200, highlight=False, emoji=False)


def _written(result: Comparison | Verdict, case: Case) -> None:
    """In a format, or on a page, as the case wants it."""
    form = case.rng.choice((*FORMATS, "text"))
    if result.history is not None:
        write(page_of(result), io.StringIO())
    elif form != "text":
        writer(form)(result, io.StringIO())
    elif isinstance(result, Comparison):
        print_report(_console(), result, top=12)
    else:
        print_report(_console(), result, top=12)


def _check(case: Case) -> None:
    _written(check(case.mutant, history=case.rng.random() < 0.4), case)


def _compare(case: Case) -> None:
    baseline, candidate, noise = case.rng.choice(
        (
            (case.clean, case.mutant, []), (case.mutant, case.clean, []), (case.mutant, case.mutant, []),
            (case.clean, case.clean, [case.mutant]), (case.mutant, case.clean, [case.clean, case.mutant]),
        )
    )  # fmt: skip
    _written(compare(baseline, candidate, noise=noise, history=case.rng.random() < 0.3), case)


def _view(case: Case) -> None:
    catalog = Catalog(case.places.under)
    Listing(catalog).write()
    catalog.find("training/baseline")
    catalog.state("training/baseline")


def _golden(case: Case) -> None:
    golden = Golden(directory=case.places.under, scratch=case.places.output)
    try:
        golden.check(case.rng.choice((case.clean, case.mutant)), name="training")
    except AssertionError as error:
        *_, (last, _) = walk_tb(error.__traceback__)
        if Path(last.f_code.co_filename).stem not in ("golden", "equivalence"):
            raise  # an assertion of ours, and not what a test is told


def _scalars(case: Case) -> None:
    recording = open_recording(case.mutant)
    for _ in scalars(recording, observations.Filter(site="*")):
        pass


def _export(case: Case) -> None:
    export_gradients(open_recording(case.mutant), str(case.places.output / "exported"))


def _import_msprobe(case: Case) -> None:
    import_gradients(case.mutant, str(case.places.output / "recording"))


def _import_onnxruntime(case: Case) -> None:
    import_statistics(case.mutant, str(case.places.output / "recording"))


def _limits(case: Case) -> None:
    from traindiff.analyse.check.chosen_rules import chosen_rules

    chosen_rules(None, None, case.places.mutant / "limits.toml")


def _load(case: Case) -> None:
    from traindiff.observe.torch.nonfinite.saved_call import load_call

    load_call(case.places.mutant)


def _rerun(case: Case) -> None:
    """As the process of `traindiff rerun` does, which this one is."""
    from traindiff.observe.torch.nonfinite.contained import main

    found = main(case.mutant, "cpu", "0.5")
    json.dumps(found, allow_nan=False)
    if "error" in found:
        raise RecordingError(found["message"])


Reader = Callable[[Case], None]

READERS: Mapping[Kind, Mapping[str, tuple[int, Reader]]] = {
    "recording": {
        "open and read": (64, _read), "show": (6, _show), "check": (7, _check), "compare": (8, _compare), "view": (5,
        _view),
        "golden": (3, _golden), "scalars": (3, _scalars), "export msprobe": (4, _export),
    },
    "msprobe": {"import msprobe": (1, _import_msprobe)},
    "onnxruntime": {"import onnxruntime": (1, _import_onnxruntime)},
    "configuration": {"limits": (1, _limits)},
    "saved": {"load": (1, _load), "rerun": (2, _rerun)},
}  # fmt: skip
"""Weight and reader by name, for each kind of input."""
