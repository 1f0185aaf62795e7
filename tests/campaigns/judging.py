"""What a reader must not do: crash, hang, take much memory, or open what is not the mutant's."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from traindiff.errors import TraindiffError

SOURCE = str(Path(sys.modules["traindiff"].__file__ or "").parent)
HERE = str(Path(__file__).parent)

HANG_SECONDS = 10.0
MOST_MEMORY = 512 << 20
"""Bytes of memory that a process may have at its peak, interpreter and libraries included."""

OF_TORCH = 512 << 20
"""As many more where torch is loaded."""

_BEYOND = 2 << 30
"""Bytes of addresses beyond those that the process has: asking for more raises MemoryError instead of taking it."""


class HangError(BaseException):
    """A reader took too long; no `except Exception` catches it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What a reader should not have done.

    Attributes:
        kind: `crash`, `signal`, `hang`, `memory` or `outside`.
        place: Where in the code; failures of one place are one.
        message: The end of the traceback, or more of what happened.
    """

    kind: str
    place: str
    message: str

    def to_json(self) -> dict[str, str]:
        """As a line of a log has it."""
        return asdict(self)


def _forget_peak() -> None:
    """Let the peak of this process's memory begin anew: what made the mutant may have taken more than its reader."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # proc(5): resets VmHWM


def peak_bytes() -> int:
    """Most memory that this process has had since a judge's last run began."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@dataclass(slots=True)
class Judge:
    """Judges what is run in this process. Its hook cannot be removed, so it belongs into a process of its own.

    Args:
        allowed: Directories in which files may be opened.
        links_in: Directory with links, whose targets are looked at.
        outside: Directory in which no file may be opened, by whatever code.
        hang_seconds: How long a reader may take.
        most_memory: Bytes that the process may have at its peak.
    """

    allowed: tuple[str, ...]
    links_in: str
    outside: Path
    hang_seconds: float = HANG_SECONDS
    most_memory: int = MOST_MEMORY
    _active: bool = False
    _opened: list[Failure] = field(default_factory=list)
    _inotify: int = -1

    def install(self) -> None:
        """Begin to see what this process opens, and limit the memory that it can ask for."""
        self.allowed += tuple(f"{one}/" for one in _of_the_interpreter())
        self._inotify = _watch(self.outside)
        sys.addaudithook(self._audit)
        signal.signal(signal.SIGALRM, _raise_hang)
        size = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _BEYOND, resource.RLIM_INFINITY))

    def run(self, reader: Callable[[], object]) -> tuple[str, Failure | None]:
        """Run a reader: `read`, `refused` or `failed`, and why."""
        _forget_peak()
        with self._watching():
            outcome, failure = self._outcome(reader)
        peak = peak_bytes()
        if failure is None and peak > self.most_memory:
            failure = Failure(kind="memory", place=f"{outcome} at {peak >> 20} MB", message="")
        if failure is None and self._opened:
            failure = self._opened[0]
        if _was_opened(self._inotify) and failure is None:
            failure = Failure(
                kind="outside", place=f"{self.outside} was opened", message="by code that is not Python's"
            )
        self._opened.clear()
        return ("failed", failure) if failure else (outcome, None)

    def _outcome(self, reader: Callable[[], object]) -> tuple[str, Failure | None]:
        try:
            signal.setitimer(signal.ITIMER_REAL, self.hang_seconds)
            try:
                reader()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except TraindiffError as error:
            message = str(error)  # which must not fail either
            message.encode("utf-8", "surrogatepass")
            return "refused", None
        except HangError as error:
            return "failed", _failure("hang", error)
        except BaseException as error:  # noqa: BLE001  whatever it is, it is what is looked for
            return "failed", _failure("crash", error)
        return "read", None

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self._active = True
        try:
            yield
        finally:
            self._active = False

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event in _ON_PATHS:
            for one in args[: _ON_PATHS[event]]:
                if isinstance(one, (str, bytes)) or hasattr(one, "__fspath__"):
                    self._look_at(event, os.fsdecode(one))
        elif event in _FORBIDDEN and not _is_our_own(event, args):
            self._note(event, repr(args)[:200])

    def _look_at(self, event: str, path: str) -> None:
        whole = path if path.startswith("/") and "/.." not in path else os.path.abspath(path)  # noqa: PTH100
        if whole.startswith(self.links_in):
            whole = os.path.realpath(whole)
        if not f"{whole}/".startswith(self.allowed):
            self._note(event, path)

    def _note(self, event: str, message: str) -> None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
            frame = frame.f_back
        place = "unknown" if frame is None else _frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        self._opened.append(Failure(kind="outside", place=f"{event} from {place}", message=message))


_ON_PATHS = {
    "open": 1, "os.listdir": 1, "os.scandir": 1, "os.mkdir": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1,
    "os.link": 2,
    "os.symlink": 2, "os.truncate": 1, "os.chmod": 1, "os.chown": 1, "os.utime": 1, "shutil.rmtree": 1, "os.mkfifo": 1,
}  # fmt: skip
"""How many of its first arguments are paths, by event."""

_FORBIDDEN = frozenset(
    {
        "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.kill",
        "socket.connect", "socket.getaddrinfo", "ctypes.dlopen", "pickle.find_class", "webbrowser.open",
        "urllib.Request",
    }
)  # fmt: skip
"""What no reader does at all."""


def _is_our_own(event: str, args: tuple[Any, ...]) -> bool:
    """Whether this is what asks the server of `view` and interrupts it, or the process in which a call is run again."""
    if event == "os.kill":
        frame = sys._getframe(2)  # what sends the signal
        return args[0] == os.getpid() or frame.f_code is subprocess.Popen.send_signal.__code__
    if event == "subprocess.Popen":
        return str(args[0]) == sys.executable and "-P" in args[1]
    return event.startswith("socket.") and "127.0.0.1" in repr(args)


def _of_the_interpreter() -> list[str]:
    """Where code comes from that is imported late, and what belongs to it."""
    names = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values(), *sys.path, SOURCE, HERE}
    names |= {os.path.realpath(name) for name in names}
    return [
        *sorted(name for name in names if name),
        "/usr/share/zoneinfo",
        "/etc/localtime",
        "/proc/self/status",
        "/dev/null",
    ]


def _failure(kind: str, error: BaseException) -> Failure:
    message = "".join(traceback.format_exception(error, limit=-6))[-3000:]
    return Failure(kind=kind, place=f"{type(error).__name__} {_place(error.__traceback__)}", message=message)


def _place(found: TracebackType | None) -> str:
    """The innermost frame of traindiff."""
    place = "outside of traindiff"
    while found is not None:
        code = found.tb_frame.f_code
        if code.co_filename.startswith(SOURCE):
            place = _frame(code.co_filename, found.tb_lineno, code.co_name)
        found = found.tb_next
    return place


def _frame(file: str, line: int, name: str) -> str:
    return f"{file.removeprefix(SOURCE).lstrip('/')}:{line} {name}"


def _raise_hang(number: int, frame: object) -> None:
    raise HangError


def _watch(directory: Path) -> int:
    """A descriptor that tells when a file in a directory is opened, whoever does."""
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = int(library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    opened = 0x20
    for one in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        if descriptor < 0 or library.inotify_add_watch(descriptor, os.fsencode(one), opened) < 0:
            raise OSError(ctypes.get_errno(), "inotify cannot be used", str(one))
    return descriptor


def _was_opened(descriptor: int) -> bool:
    try:
        return bool(os.read(descriptor, 1 << 16))
    except BlockingIOError:
        return False
