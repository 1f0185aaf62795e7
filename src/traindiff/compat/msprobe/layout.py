"""Where msprobe's gradient monitor puts its files, and how whole files get there.

{directory}/rank{r}/grad_summary_{step}.csv
{directory}/rank{r}/step{step}/{parameter}.npy
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from os.path import isdir, isfile  # which never raise
from pathlib import Path

from traindiff.compat.imported import check_room, numbered
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import NotARecordingError
from traindiff.storage.location import file_name

_UNFINISHED = ".unfinished"
_RANK = re.compile(r"rank(\d{1,18})", re.ASCII)
_SUMMARY = re.compile(r"grad_summary_(\d{1,18})\.csv", re.ASCII)
_STEP = re.compile(r"step(\d{1,18})", re.ASCII)

MOST_TABLE_BYTES = 1 << 24
"""Size of a table at most: 20,000 parameters take a quarter of it."""


def rank_directory(directory: Path, rank: int) -> Path:
    """The directory of a rank."""
    return directory / f"rank{rank}"


def summary_file(rank: Path, step: int) -> Path:
    """The table of a step, in the directory of a rank."""
    return rank / f"grad_summary_{step}.csv"


def direction_file(rank: Path, step: int, name: str) -> Path:
    """The directions of a parameter in a step.

    It is called after the parameter, as msprobe has it, if that is a file name on every system; otherwise after an
    injective encoding of it (`traindiff.storage.location`). The name itself stands in the table of the step.
    """
    return rank / f"step{step}" / f"{file_name(name)}.npy"


def ranks_in(directory: Path) -> dict[int, Path]:
    """Directories of ranks by number, ascending."""
    return numbered(directory, _RANK, kind=isdir, refuse=damaged)


def summaries_in(rank: Path) -> dict[int, Path]:
    """Tables in the directory of a rank, by step, ascending."""
    return numbered(rank, _SUMMARY, kind=isfile, refuse=damaged)


def direction_steps_in(rank: Path) -> dict[int, Path]:
    """Directories with directions, by step, ascending."""
    return numbered(rank, _STEP, kind=isdir, refuse=damaged)


def content(rank: Path, path: Path, *, limit: int = MOST_TABLE_BYTES) -> bytes:
    """The content of a file in the directory of a rank, which may have `limit` bytes.

    Raises:
        NotARecordingError: It is no regular file inside of the monitor's directory, or is larger.
    """
    folder = Folder.of(rank.parent, refuse=damaged)
    return folder.read(path.relative_to(rank.parent).as_posix(), limit=limit)


def damaged(path: Path | str, message: str) -> NotARecordingError:
    """The error for a file of the monitor that cannot be used."""
    return NotARecordingError(
        f"{path} is not of msprobe's gradient monitor: {message}. Restore the file from where it was copied."
    )


def put(path: Path, content: bytes) -> None:
    """Write a whole file at once: a reader sees the old one or the new one. Makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + _UNFINISHED)
    unfinished.write_bytes(content)
    unfinished.replace(path)


def make_room(directory: Path, *, ranks: Collection[int] | None, overwrite: bool, where: str, fix: str) -> None:
    """Remove the files of an earlier run, or refuse to mix them with those of this one.

    Args:
        directory: May not exist.
        ranks: Whose files are looked for; None for those of all ranks.
        overwrite: Remove them. Directories that hold anything else are refused all the same.
        where: What the user wrote that names the directory.
        fix: How to have them replaced.

    Raises:
        ConfigError: It is a file, or holds what must not be removed.
    """
    stale = [path for rank, path in ranks_in(directory).items() if ranks is None or rank in ranks]
    other = sorted(str(one.relative_to(directory)) for path in stale for one in _foreign(path))
    earlier = f"holds gradients of another run ({', '.join(path.name for path in stale)})"
    check_room(
        directory, source="the gradient monitor", where=where, content="directions and tables of gradients",
        other=other, earlier=earlier if stale and not overwrite else "", fix=fix,
    )  # fmt: skip
    for path in stale:
        shutil.rmtree(path)


def _foreign(rank: Path) -> list[Path]:
    """Files in the directory of a rank that the monitor has not written."""
    known = {*summaries_in(rank).values(), *direction_steps_in(rank).values()}
    found = [one for one in rank.iterdir() if one not in known and not one.name.endswith(_UNFINISHED)]
    for step in direction_steps_in(rank).values():
        found += [one for one in step.iterdir() if one.suffix not in (".npy", _UNFINISHED)]
    return found
