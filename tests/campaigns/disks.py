"""Record trainings on disks that fail: `python -m tests.campaigns.disks`. Exits with 1 where a goal is missed.

In every row the training has the same bits and the same exit status as without a recording, a warning says what is
lost, and so does the recording, where there still is one. Rows that mount file systems need root.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import traindiff

ROOT = Path(__file__).parents[2]
WRITE, IN_PLACE, OPEN, RENAME, LOOK = 1, 2, 4, 8, 16
EVERYTHING = WRITE | IN_PLACE | OPEN | RENAME
AT = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A disk.

    Attributes:
        name: What happens to it.
        action: What the training does before step `AT`; `{run}` is the recording, `{disk}` where it lies.
        mount: Options of a tmpfs on which the recording lies; None for the disk that is there.
        status: What the recording must say; "" where it is whole, None where there is none.
        slow: Whether it takes minutes.
    """

    name: str
    action: tuple[str, ...]
    status: str | None
    mount: str | None = None
    slow: bool = False


def _failing(name: str, kinds: int, number: int, status: str, *, seconds: float = 0, slow: bool = False) -> Row:
    return Row(name=name, action=("fail", str(kinds), str(number), str(seconds)), status=status, slow=slow)


_NO_END = "was not closed"
_EARLY = "could not be written"
_LATE = "its end could not be written: rank.json"

ROWS: tuple[Row, ...] = (
    _failing("ENOSPC in write", WRITE, errno.ENOSPC, "step 5 could not be written: No space left on device"),
    _failing("EDQUOT in write", WRITE, errno.EDQUOT, "step 5 could not be written: Disk quota exceeded"),
    _failing("EFBIG in write", WRITE, errno.EFBIG, "step 5 could not be written: File too large"),
    _failing("EIO in write", WRITE, errno.EIO, "step 5 could not be written: Input/output error"),
    _failing("EIO in everything", EVERYTHING, errno.EIO, _NO_END),
    _failing("EIO in everything, and in stat", EVERYTHING | LOOK, errno.EIO, _NO_END),
    _failing("ESTALE in everything", EVERYTHING | LOOK, errno.ESTALE, _NO_END),
    _failing("EROFS: became read-only", EVERYTHING, errno.EROFS, _NO_END),
    _failing("ENOSPC in open and rename", OPEN | RENAME, errno.ENOSPC, _LATE),
    _failing("slow: 0.5 s for each write", WRITE, 0, "", seconds=0.5),
    _failing("slow: 2 s for each stat", LOOK, 0, "", seconds=2),
    _failing("hangs in write", WRITE, 0, _NO_END, seconds=3600, slow=True),
    _failing("hangs in stat", LOOK, 0, _NO_END, seconds=3600, slow=True),
    _failing("hangs in one write, for 75 s", WRITE, 0, _EARLY, seconds=-75, slow=True),
    Row(name="full tmpfs of 160 kB", action=(), mount="size=160k", status="No space left on device"),
    Row(name="full tmpfs, then room again", mount="size=8m", status="step 5 could not be written",
        action=("shell", "head -c 9000000 /dev/zero > {disk}/ballast 2> /dev/null || (sleep 1; true)")),
    Row(name="tmpfs without inodes left", mount="size=8m,nr_inodes=64", status=_LATE,
        action=("shell", "for i in $(seq 100); do touch {disk}/$i 2> /dev/null || true; done")),
    Row(name="rm -rf of the recording", action=("shell", "rm -rf {run}"), status=None),
    Row(name="rm -rf of the disk's directory", action=("shell", "rm -rf {disk}"), status=None),
    Row(name="mv of the recording", action=("shell", "mv {run} {run}-moved"), status=None),
    Row(name="umount -l of its tmpfs", action=("shell", "umount -l {disk}"), mount="size=8m", status=None),
    Row(name="rm of observations.arrows", status="no longer there",
        action=("shell", "rm {run}/rank-00000/observations.arrows")),
    Row(name="rm of run.json", action=("shell", "rm {run}/run.json"), status=None),
    Row(name="truncate observations.arrows", status="cut short",
        action=("shell", "truncate -s 9999 {run}/rank-00000/observations.arrows")),
    Row(name="truncate observations.crc", status="cut short",
        action=("shell", "truncate -s 30 {run}/rank-00000/observations.crc")),
    Row(name="chmod 000 of the rank's directory", action=("shell", "chmod 000 {run}/rank-00000"), status=""),
    Row(name="mount -o remount,ro", action=("shell", "mount -o remount,ro {disk}"), mount="size=8m", status=_NO_END),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a row gave: its figures, and what is wrong with it."""

    row: Row
    figures: str = ""
    wrong: str = ""
    skipped: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave out the rows that take minutes")
    parser.add_argument("--only", default="", help="rows whose name has this in it")
    arguments = parser.parse_args()
    rows = [row for row in ROWS if arguments.only in row.name and not (arguments.quick and row.slow)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="traindiff-disks-") as here:
        library = Path(here, "failing_disk.so")
        source = Path(__file__).with_name("failing_disk.c")
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        expected = _trained("", library, here, ())
        with ThreadPoolExecutor(2) as pool:  # the slow rows only wait
            ordered = sorted(rows, key=lambda row: not row.slow)
            outcomes = list(pool.map(lambda row: _told(_outcome(row, library, Path(here), expected)), ordered))
    wrong = sum(bool(one.wrong) for one in outcomes)
    skipped = sum(bool(one.skipped) for one in outcomes)
    print(f"{len(outcomes)} rows, {skipped} skipped, {wrong} wrong, {time.monotonic() - began:.0f} s")
    return int(wrong > 0)


def _told(outcome: Outcome) -> Outcome:
    word = "WRONG" if outcome.wrong else "skipped" if outcome.skipped else "ok"
    print(f"{outcome.row.name:36} {word:8} {outcome.wrong or outcome.skipped or outcome.figures}", flush=True)
    return outcome


def _trained(run: str, library: Path, disk: str | Path, action: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LD_PRELOAD": str(library), "FAILING_PREFIX": str(disk), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.campaigns.disk_training", run, str(AT), *action]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400, check=False)


def _outcome(row: Row, library: Path, here: Path, expected: subprocess.CompletedProcess[str]) -> Outcome:
    disk = Path(tempfile.mkdtemp(dir=here))
    try:
        with _mounted(disk, row.mount):
            run = disk / "run"
            action = [part.format(run=run, disk=disk) for part in row.action]
            actual = _trained(str(run), library, disk, action)
            if "CalledProcessError" in actual.stderr and row.mount:
                return Outcome(row=row, skipped=f"not permitted: {row.action[1]}")
            if row.name.startswith("chmod"):
                (run / "rank-00000").chmod(0o700)
            return Outcome(row=row, wrong="; ".join(_wrongs(row, run, actual, expected)), figures=_figures(actual, run))
    except PermissionError as error:
        return Outcome(row=row, skipped=str(error))


def _wrongs(
    row: Row, run: Path, actual: subprocess.CompletedProcess[str], expected: subprocess.CompletedProcess[str]
) -> Iterator[str]:
    if actual.stdout.split()[:1] != expected.stdout.split()[:1]:
        yield f"other bits: {actual.stdout!r} {actual.stderr[-300:]}"
    if actual.returncode != expected.returncode:
        yield f"exit status {actual.returncode} instead of {expected.returncode}"
    if "Traceback" in actual.stderr:
        yield f"a traceback: {actual.stderr[-600:]}"
    warned = actual.stderr.count("TraindiffWarning: traindiff")
    if warned != (row.status != ""):
        yield f"{warned} warnings: {actual.stderr[-600:]}"
    message = _says(run)
    if (
        (message is None) != (row.status is None)
        or (row.status or "") not in (message or "")
        or (row.status == "" and message)
    ):
        yield f"the recording says {message!r}"


def _says(run: Path) -> str | None:
    """What a recording says of its end; None where there is none."""
    try:
        recording = traindiff.open_recording(str(run))
        list(recording.steps(0))
        return recording.status(0).message
    except traindiff.CorruptRecordingError as error:
        recording = traindiff.open_recording(str(run))
        return f"{recording.status(0).message} {error}"
    except traindiff.NotARecordingError:
        return None


def _figures(actual: subprocess.CompletedProcess[str], run: Path) -> str:
    slowest, end = [*actual.stdout.split(), "?", "?", "?"][1:3]
    return f"slowest step {slowest} s, end {end} s; {_says(run)}"


@contextmanager
def _mounted(disk: Path, options: str | None) -> Iterator[None]:
    if options is None:
        try:
            yield
        finally:
            shutil.rmtree(disk, ignore_errors=True)
        return
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        raise PermissionError("mount not permitted")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], capture_output=True, check=False)


if __name__ == "__main__":
    sys.exit(main())
