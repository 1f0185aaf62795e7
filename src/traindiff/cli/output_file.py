"""The files that commands write: refused at once if they cannot be written, and replaced only by a whole result."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from traindiff.errors import ConfigError, Problem

FIX = "Give the path of a file in a directory that is there and where you may write."


def check_writable(
    output: Path, *, option: str = "", asked_by: str = "report", consequence: str = "nothing was written"
) -> None:
    """Refuse a file that cannot be written, before its content is computed. What is there stays as it is.

    Args:
        output: The file.
        option: The option that names it, for messages; empty for none.
        asked_by: The command, for messages.
        consequence: What was therefore not done, for messages.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        what = "is no regular file." if is_special(output) else ""
        if not what and output.exists():
            output.open("ab").close()
        elif not what:
            made = Path(os.path.realpath(output))  # a link may lead to a file that is not there yet
            made.open("xb").close()
            made.unlink()
    except OSError as error:
        what = f"cannot be written: {error.strerror}."
    if what:
        problem = Problem(where=f"{option} {output}".strip(), what=what, fix=FIX)
        raise ConfigError(asked_by, [problem], consequence=consequence)


def is_special(file: Path) -> bool:
    """True for a pipe, a socket or a disk: opening it may wait forever, or destroy what is there."""
    try:
        mode = file.stat().st_mode
    except OSError:  # not there, or to be told by opening it
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISCHR(mode))


@contextmanager
def written_whole(output: Path, mode: str, **how: Any) -> Iterator[IO[Any]]:
    """Yield a file whose content becomes that of `output` in the end; `output` stays as it is if an error is raised.

    Args:
        output: The file.
        mode: `w+` or `w+b`.
        how: Further arguments of `open`.

    Raises:
        OSError: The file cannot be written.
    """
    with tempfile.TemporaryFile(mode, **how) as file:
        yield file
        file.seek(0)
        with output.open(mode.replace("+", ""), **how) as final:
            shutil.copyfileobj(file, final)
