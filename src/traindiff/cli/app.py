"""The command line as a whole: its commands, its errors, its exit codes."""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from traindiff._version import __version__
from traindiff.cli.command import Application
from traindiff.errors import TraindiffError
from traindiff.present.data import writer
from traindiff.present.text.layout import print_line

UNUSABLE = 2
"""Exit code for input or settings that cannot be used, and for a fault of traindiff itself."""

INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 and the number of the signal, as shells count."""

NO_READER = 141
"""Exit code if nobody reads the output any more, as shells count it for SIGPIPE."""

GROUPS: Mapping[str, Mapping[str, str]] = {
    "Record a training": {"run": "run", "import": "recordings"},
    "Ask recordings": {
        "check": "check", "compare": "compare", "report": "report", "view": "report", "show": "recordings", "ls": "ls",
        "rerun": "rerun", "export": "recordings",
    },
    "Run trainings and compare them": {"verify": "verify", "investigate": "investigate", "resume": "resume"},
    "Compare saved weights": {"weights": "weights"},
    "Make recordings smaller": {"compact": "compact", "prune": "compact"},
    "Learn, and check this machine": {"demo": "demo", "explain": "explain", "doctor": "doctor", "mcp": "mcp"},
}  # fmt: skip
"""All commands, each with its module beside this one: in the groups and in the order in which `--help` lists them."""

MODULES = {name: module for names in GROUPS.values() for name, module in names.items()}
"""The module of each command."""


@contextmanager
def _documented_exit_codes() -> Iterator[None]:
    """Exit as documented where typer would exit with 1, which says that runs diverged."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        raise typer.Exit(NO_READER) from None
    except KeyboardInterrupt:
        messages.print("traindiff: interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except EOFError:
        traceback.print_exc()
        raise typer.Exit(UNUSABLE) from None


def _discard_output() -> None:
    """Throw away what nobody reads: Python writes it when it ends, and would fail then."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)


class _Commands(TyperGroup):
    """The commands, which `--help` lists group by group."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the command line as far as it is of all commands."""
        with _documented_exit_codes():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that is asked for."""
        with _documented_exit_codes():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        """The names, in the order of `--help`."""
        return [name for name in MODULES if name in self.commands]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each group."""
        names = self.list_commands(ctx)
        width = max(map(len, names), default=0)
        for title, group in GROUPS.items():
            rows = [(f"{one:<{width}}", self.commands[one].get_short_help_str(200)) for one in names if one in group]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


app = Application(
    name="traindiff",
    cls=_Commands,
    help="Find where, when and on which rank the numbers of a training first go wrong.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},  # all commands below inherit it
)


class _Output(Console):
    """A console that raises `BrokenPipeError` if nobody reads it; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Raise the error again."""
        raise BrokenPipeError


messages = _Output(stderr=True, highlight=False, emoji=False)
"""Standard error: for everything except results."""

results = _Output(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 200)
"""Standard output: for results."""


def says_what_is_wrong(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command, which now prints an error of traindiff or of the file system as its message, and exits with 2."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            raise
        except (TraindiffError, OSError) as error:
            message = str(error)
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            message = (
                "this command needs torch, which is not installed. Install it with: pip install 'traindiff[torch]'"
            )
        for line in f"traindiff: {message}".split("\n"):
            print_line(messages, Text(line))
        raise typer.Exit(UNUSABLE)

    return run


def print_result(result: Any, form: str, *, text: Callable[[], None]) -> None:
    """Print a verdict on standard output, in one of `FORMATS`, or as `text` prints it for people."""
    if form == "text":
        text()
    else:
        writer(form)(result, sys.stdout)


def _version(wanted: bool) -> None:  # noqa: FBT001  the shape of typer's callbacks
    if wanted:
        results.print(f"traindiff {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  its callback prints it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    local_rank: Annotated[  # noqa: ARG001  a launcher of ranks may give it
        int | None, typer.Option("--local_rank", "--local-rank", hidden=True)
    ] = None,
) -> None:
    """Find where, when and on which rank the numbers of a training first go wrong.

    Without a command, list the recordings in this directory, and what to ask of them.
    """
    if context.invoked_subcommand is None:
        from traindiff.present.text.overview import print_overview

        print_overview(results, Path.cwd())


class ScriptReady(Exception):  # noqa: N818  not an error
    """Carries the script out of the command line's own handling of errors, which is not for the script's errors.

    Args:
        settings: The arguments of `run_recorded`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings


def _declare(arguments: Sequence[str]) -> None:
    """Import the command that is asked for; all of them if the first argument names none, as `--help` does."""
    module = MODULES.get(arguments[0] if arguments else "", "commands")
    import_module(f"traindiff.cli.{module}")  # here, as each of them imports this module


@contextmanager
def _all_characters() -> Iterator[None]:
    """Write a character that the terminal's encoding lacks as an escape, instead of failing."""
    streams = [one for one in (sys.stdout, sys.stderr) if isinstance(one, io.TextIOWrapper)]
    before = [one.errors for one in streams]
    for one in streams:
        one.reconfigure(errors="backslashreplace")
    try:
        yield
    finally:
        for one, errors in zip(streams, before, strict=True):
            one.reconfigure(errors=errors)


def main() -> None:
    """Entry point of the `traindiff` command."""
    try:
        with _all_characters():
            _declare(sys.argv[1:])
            app()
    except ScriptReady as ready:
        settings = ready.settings
    except KeyboardInterrupt:
        messages.print("traindiff: interrupted")
        sys.exit(INTERRUPTED)
    except Exception:  # noqa: BLE001  Python would exit with 1, which says that runs diverged
        traceback.print_exc()
        sys.exit(UNUSABLE)
    else:
        return
    # Out here, so that what the script raises is its own: not in the context of anything, and handled by nobody.
    from traindiff.run.script.run import run_recorded

    run_recorded(**settings)
