"""What recordings of another tool's files have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from traindiff.errors import NotARecordingError
from traindiff.storage import Gap, RecordingWriter


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
        "forced_by": None,
        "recipe": None,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": list(command),
        "versions": {},
        "environment": {},
        "source": {},
        **more,
    }  # fmt: skip


@contextmanager
def rank_writer(
    recording: str, *, run: Mapping[str, Any], rank: int, world_size: int, overwrite: bool
) -> Iterator[RecordingWriter]:
    """A writer of what one rank has, which leaves the recording incomplete where a file cannot be read."""
    writer = RecordingWriter(recording, run=run, rank=rank, world_size=world_size, overwrite=overwrite)
    try:
        yield writer
    except NotARecordingError as error:
        writer.give_up(Gap(reason=str(error)))
        raise
    finally:
        writer.close()
