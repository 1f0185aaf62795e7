"""What the readers and writers of other tools' files have in common."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from traindiff.core.untrusted.demands import Refuse
from traindiff.core.untrusted.folder import Folder
from traindiff.errors import ConfigError, NotARecordingError, Problem
from traindiff.storage import Gap, RecordingWriter


class OutputExistsError(ConfigError, FileExistsError):
    """A `ConfigError` that is a `FileExistsError`, too, as programs that used another tool expect."""


def numbered(
    directory: Path, pattern: re.Pattern[str], *, kind: Callable[[Path], bool], refuse: Refuse
) -> dict[int, Path]:
    """Entries of a directory by the number in their name, ascending; none where there is no directory.

    Args:
        directory: A stranger may have filled it.
        pattern: Matches a name; its first group is the number.
        kind: Says whether an entry is a file, or a directory, as it should be.
        refuse: Makes the error for links that lead outside, and for two entries of one number.
    """
    if not directory.is_dir():
        return {}
    folder = Folder.of(directory, refuse=refuse)
    found: dict[int, Path] = {}
    for one in sorted(directory.iterdir()):
        if match := pattern.fullmatch(one.name):
            folder.within(one.name)
            if kind(one):
                if (number := int(match[1])) in found:
                    raise refuse(str(one), f"{found[number].name} beside it has the same number")
                found[number] = one
    return dict(sorted(found.items()))


def check_room(
    directory: Path, *, source: str, where: str, content: str, other: Sequence[str], earlier: str, fix: str
) -> None:
    """Refuse to write into a directory where something would be mixed with what is there, or lost.

    Args:
        directory: May not exist.
        source: Who writes.
        where: What the user wrote that names the directory.
        content: What is written.
        other: Names of what is there and not of that kind.
        earlier: Why it may not be written to as it is: "holds gradients of another run"; empty if it may.
        fix: How to have it replaced.

    Raises:
        OutputExistsError: It is a file, or holds one of the two.
    """
    if directory.exists() and not directory.is_dir():
        what, fix = "is a file, and files are written into a directory.", "Give another path."
    elif other:
        what = f"holds other things than {content} ({', '.join(other[:3])})."
        fix = "Give the path of a directory that does not exist yet."
    elif earlier:
        what = f"already {earlier}."
    else:
        return
    raise OutputExistsError(source, [Problem(where=where, what=what, fix=fix)], consequence="nothing was written")


def import_ranks(
    recording: str,
    ranks: Mapping[int, Path],
    write_rank: Callable[[RecordingWriter, Path, int], int],
    *,
    settings: Mapping[str, Any],
    command: Sequence[str],
    overwrite: bool,
) -> int:
    """Make a recording of the files of some ranks; returns how many tensors were read.

    Args:
        recording: The recording to make: a local path or any fsspec URL.
        ranks: Directories of the ranks.
        write_rank: Writes what is in one of them, given the number of ranks; returns how many tensors that are.
        settings: See `run_content`.
        command: See `run_content`.
        overwrite: Replace a recording that is there.

    Raises:
        ConfigError: `recording` is taken.
        NotARecordingError: A file cannot be read. The recording is left incomplete.
    """
    world_size = max(ranks) + 1
    recorded = None if len(ranks) == world_size else list(ranks)
    run = run_content(world_size, settings={**settings, "ranks": recorded}, command=command)
    count = 0
    for rank, path in ranks.items():
        writer = RecordingWriter(recording, run=run, rank=rank, world_size=world_size, overwrite=overwrite)
        try:
            count += write_rank(writer, path, world_size)
        except NotARecordingError as error:
            writer.give_up(Gap(reason=str(error)))
            raise
        finally:
            writer.close()
    return count


def run_content(world_size: int, *, settings: Mapping[str, Any], command: Sequence[str], **more: Any) -> dict[str, Any]:
    """Content of `run.json` where little is known of the run.

    Args:
        world_size: Number of ranks.
        settings: Those of the recording's settings that are not what they are if left out.
        command: What has made the recording.
        more: Entries in place of empty ones.
    """
    return {
        "world_size": world_size,
        "mesh": None,
        "engine": None,
        "settings": {
            "select": ["*"], "detail": ["summary"], "steps": None, "ranks": None, "every": 1, "batch_axis": {},
            "sample_order": "blocks", "shards": [], "evaluation": False, "replica": None, **settings,
        },
        "first_step": None,
        "forced_by": None,
        "recipe": None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "versions": {},
        "environment": {},
        "source": {},
        **more,
    }  # fmt: skip


def rank_content(world_size: int, **more: Any) -> dict[str, Any]:
    """Content of `rank.json` where little is known of the model; `more` stands in place of empty entries."""
    return {
        "model": "", "modules": {}, "parameters": {}, "buffers": {}, "tied": {}, "optimizers": [],
        "world_size": world_size, "mesh": None, **more,
    }  # fmt: skip
