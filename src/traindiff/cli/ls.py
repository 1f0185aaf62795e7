"""`traindiff ls`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from traindiff.cli.app import app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.options import SHOWN, JsonOption
from traindiff.cli.report import check_directory

if TYPE_CHECKING:
    from traindiff.present.viewer.catalog import Listed

SCHEMA_NAME = "traindiff-recordings"
SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A recording of the list.

    Attributes:
        path: Its path, as other commands take it.
        created: When it began, as in `run.json`; empty if it is not known.
        ranks: Number of its ranks; 0 if it is not known.
        size_bytes: Size of its files.
        ending: `closed`, `aborted`, `unclosed`, `unreadable`, or `unread` if there were too many to look into.
        message: What else is to say of its ending.
        model: Class of its model; empty if it is not known.
        last_step: The last step that all ranks have; None if there is none.
        last_loss: The last loss; None if there is none, or if it is not finite.
    """

    path: str
    created: str
    ranks: int
    size_bytes: int
    ending: str
    message: str
    model: str = ""
    last_step: int | None = None
    last_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingList:
    """The recordings below a directory, the latest first.

    Attributes:
        directory: The directory.
        recordings: Its recordings, or as many of them as are listed at a time.
        has_more: Whether there are more behind them.
    """

    directory: str
    recordings: tuple[ListedRun, ...]
    has_more: bool = False

    def to_json(self) -> dict[str, Any]:
        """The list in the schema of `--json`, as JSON values."""
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "directory": self.directory,
            "recordings": [asdict(one) for one in self.recordings],
            "has_more": self.has_more,
        }


def listed_run(directory: str, one: Listed, path: str | None) -> ListedRun:
    """A recording of the list, with what a few of its steps say.

    Args:
        directory: The directory as it was given.
        one: What its small files say.
        path: Where it is; None if it is not to be looked into.
    """
    import math
    import posixpath

    from traindiff.core.site import printable
    from traindiff.errors import TraindiffError
    from traindiff.present.viewer.looking import look

    about = ListedRun(
        path=printable(posixpath.normpath(one.name) if directory == "." else posixpath.join(directory, one.name)),
        created=one.created, ranks=one.ranks, size_bytes=one.size_bytes, ending=one.ending,
        message=one.message,
    )  # fmt: skip
    if path is None or one.ending in ("unread", "unreadable"):
        return about
    try:
        found = look(path, size_bytes=one.size_bytes)
    except (TraindiffError, OSError) as error:
        return ListedRun(**{**asdict(about), "ending": "unreadable", "message": str(error)})
    loss = found.losses[-1][1] if found.losses else None
    seen = {
        "model": found.model,
        "last_step": found.last_step,
        "last_loss": loss if loss is not None and math.isfinite(loss) else None,
    }
    return ListedRun(**{**asdict(about), **seen})


def print_list(console: Console, found: RecordingList, *, after: int) -> None:
    """Print a line for each recording behind those that were skipped."""
    from traindiff.present.text.layout import columns
    from traindiff.present.text.overview import ENDINGS
    from traindiff.present.viewer.catalog import DEPTH

    if not found.recordings:
        other = "other " if after else ""
        nothing = f"There is no {other}recording under {found.directory}, down to {DEPTH} levels of directories."
        console.print(Text(nothing), soft_wrap=True)
        return
    table = columns(left=("recording", "began"), right=("ranks", "size", "last step", "last loss"))
    table.add_column("", overflow="fold")
    for one in found.recordings:
        numbers = (
            str(one.ranks or "-"),
            f"{one.size_bytes / 1e6:.1f} MB",
            "-" if one.last_step is None else str(one.last_step),
            "-" if one.last_loss is None else f"{one.last_loss:.6g}",
        )
        cells = (one.path, one.created[:16].replace("T", " "), *numbers, ENDINGS[one.ending])
        table.add_row(*map(Text, cells))
    console.print(table)
    if found.has_more:
        more = f"There are more than the {len(found.recordings)} of this list."
        rest = f"--after {after + len(found.recordings)} lists further ones."
        console.print(Text(f"{more} {rest}"), soft_wrap=True)


@app.command("ls", short_help="List the recordings under a directory.")
@says_what_is_wrong
def list_recordings(
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="Recordings are looked for under it. May be a URL.")
    ] = ".",
    after: Annotated[
        int,
        typer.Option(min=0, metavar="N", rich_help_panel=SHOWN, help="List what comes after the first N recordings."),
    ] = 0,
    as_json: JsonOption = False,
) -> None:
    """List the recordings under a directory, the latest first: when they began, their ranks, size, last step and loss.

    At most 500 are listed at a time: the latest ones, or of a store the first ones by name. --after 500 lists those
    behind them. Exits with 0, and with 2 if there is no such directory.
    """
    from rich.progress import track

    from traindiff.present.viewer.pages import catalog_of

    check_directory(directory, asked_by="ls")
    catalog = catalog_of(directory)
    names = track(
        catalog.recordings(after), description="looking into recordings", console=messages, transient=True,
        disable=not messages.is_terminal,
    )  # fmt: skip
    runs = [
        listed_run(directory, one, None if (path := catalog.find(one.name)) is None else str(path)) for one in names
    ]
    found = RecordingList(directory=directory, recordings=tuple(runs), has_more=catalog.has_more)
    print_result(found, "json" if as_json else "text", text=lambda: print_list(results, found, after=after))
