"""The process of a node that writes what its ranks record into one file, and how ranks reach it.

The first rank that needs it starts it. Ranks send whole files over a socket, and each is answered when the file system
has taken it. So nothing that a rank has been told is written is lost if the rank is killed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import posixpath
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from pathlib import Path

from traindiff.storage.gap import GAP_FILE
from traindiff.storage.location import RecordingLock, node_name, release_in_forks, segment_name
from traindiff.storage.node_files import MOST_FRAMES, NodeFiles, frame
from traindiff.storage.written_files import Lost, UnbufferedFile, WrittenFiles, write_all

START_SECONDS = 60.0
"""How long ranks wait for the process, and it for the first of them."""

IDLE_SECONDS = 2.0
"""How long it stays after the last rank has gone."""

_LONGEST_DIRECTORY = 60
"""Characters of the directory of sockets: their paths have 107 at most."""

_begun: Counter[str] = Counter()  # recordings of this process, by file
_COUNT = struct.Struct("<I")
_SIZES = struct.Struct("<HQ")
_OF_ANOTHER = "another recording"
_ENDINGS = 1 << 12
"""Frames that are kept free for what ranks write when they end."""

_PROGRAM = "import sys; from traindiff.storage.node_writer import main; main(*sys.argv[1:])"
_processes: list[subprocess.Popen[bytes]] = []


def node_number(rank: int) -> int:
    """The number of this node, as the launcher says it; the rank itself without one."""
    for name in ("GROUP_RANK", "SLURM_NODEID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return rank // _ranks_here()


def num_nodes(world_size: int) -> int:
    """The number of nodes of so many ranks; that of the ranks without a launcher."""
    return -(-world_size // _ranks_here())


def _ranks_here() -> int:
    """The number of ranks of this node, as the launcher says it; 1 without one."""
    size = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, int(size) if size.isdigit() else 1)


def _socket_path(file: str) -> str:
    """Where the process of a node listens: a path of this user, for one recording in this file.

    The ranks of a node have one parent, which starts them, and begin their recordings in the same order.
    """
    file = os.path.realpath(file)
    _begun[file] += 1
    is_alone = _ranks_here() == 1 and not os.environ.get("SLURM_NODEID")
    said = f"{file} {os.getpid() if is_alone else os.getppid()} {_begun[file]}"
    name = f"traindiff-{os.getuid()}"
    directory = Path(tempfile.gettempdir(), name)
    if len(str(directory)) > _LONGEST_DIRECTORY:
        directory = Path("/tmp", name)
    directory.mkdir(mode=0o700, exist_ok=True)
    if directory.lstat().st_uid != os.getuid() or directory.is_symlink():
        raise OSError(errno.EPERM, f"{directory} belongs to somebody else")
    return str(directory / hashlib.sha256(said.encode()).hexdigest()[:24])


class NodeConnection:
    """A rank's connection to the process that writes for its node, which is started if there is none.

    Args:
        root: Directory of the recording.
        node: Number of the node.
        rank: Name of the rank's directory.
        overwrite: Replace the file of an earlier recording.

    Raises:
        OSError: The process cannot be started, or the file is there already, or is being written by another training.
    """

    def __init__(self, root: str, node: int, rank: str, *, overwrite: bool) -> None:
        self._root = root
        file = posixpath.join(root, node_name(node))
        path = _socket_path(file)
        with ExitStack() as locked:
            lock = locked.enter_context(Path(f"{path}.lock").open("w"))
            _lock(lock.fileno())
            name = rank.encode()
            hello = _COUNT.pack(len(name)) + name
            self._socket = _connected(path) or _started(path, file, overwrite=overwrite)
            if (message := self._told(hello)) == _OF_ANOTHER:  # the process of a recording that has just ended
                self.release()
                self._socket = _started(path, file, overwrite=overwrite)
                message = self._told(hello)
        release_in_forks(self)
        if message:
            self.release()
            raise FileExistsError(errno.EEXIST, message)

    def put(self, path: str, content: bytes) -> None:
        """Have a file written, and wait until the file system has taken it.

        Raises:
            OSError: It could not be written, or the process has ended.
        """
        name = posixpath.relpath(path, self._root).encode()
        if message := self._told(_SIZES.pack(len(name), len(content)) + name, content):
            raise OSError(errno.EIO, message)

    def _told(self, *parts: bytes) -> str:
        """The answer to a request: empty, or what went wrong."""
        try:
            for part in parts:
                self._socket.sendall(part)
            (size,) = _COUNT.unpack(_received(self._socket, _COUNT.size))
            return _received(self._socket, size).decode(errors="replace")
        except OSError as error:
            raise OSError(errno.EPIPE, "the process that writes for this node has ended") from error

    def release(self) -> None:
        """End the connection. The process ends after the last one."""
        self._socket.close()


def _lock(descriptor: int) -> None:
    import fcntl

    fcntl.flock(descriptor, fcntl.LOCK_EX)


def _connected(path: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


def _started(path: str, file: str, *, overwrite: bool) -> socket.socket:
    """A connection to a new process."""
    if os.path.lexists(file):
        lock = RecordingLock(file)
        lock.release()
        if lock.is_taken:
            raise FileExistsError(errno.EEXIST, "another recording is being written there")
        if not overwrite:
            raise FileExistsError(errno.EEXIST, f"there is a recording already ({posixpath.basename(file)})")
        os.unlink(file)  # noqa: PTH108
    with suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, path, file], stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    _processes.append(process)
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if (found := _connected(path)) is not None:
            return found
        if process.poll() is not None:
            break
        time.sleep(0.02)
    raise OSError(errno.EIO, "the process that writes for this node could not be started")


def _received(connection: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = connection.recv(min(size - len(found), 1 << 20))
        if not part:
            raise ConnectionResetError("the other end has gone")
        found += part
    return bytes(found)


class FilesOfNode:
    """Makes the files of one rank in the file of its node: the counterpart of `WrittenFiles`.

    Args:
        root: Directory of the recording.
        directory: Directory of the rank in it.
        connection: To the process that writes.
    """

    is_local = True

    def __init__(self, root: str, directory: str, connection: NodeConnection) -> None:
        self._root = root
        self._directory = directory
        self._connection = connection
        self._end = 0
        self._sizes: dict[str, int] = {}
        self._beside = WrittenFiles(root)  # of files that are not of a rank

    def append(self, seal: bytes, message: bytes, step: int | None, optimizer: str) -> None:  # noqa: ARG002
        """Have a message and its seal written, as a segment of the stream."""
        self.put(posixpath.join(self._directory, segment_name(self._end, len(message))), message + seal)
        self._end += len(message)

    def put(self, path: str, content: bytes) -> None:
        """Have a file written, or replaced."""
        if posixpath.dirname(path) == self._root:
            self._beside.put(path, content)
            return
        self._connection.put(path, content)
        self._sizes[path] = len(content)

    def put_in_folder(self, path: str, content: bytes, *, step: int, optimizer: str) -> None:  # noqa: ARG002
        """Have a file written that readers open once a message names it."""
        self.put(path, content)

    put_last = put

    def begin(self) -> None:
        """Nothing: what was written was handed to the file system at once."""

    def end(self) -> None:
        """Nothing: what was written was handed to the file system at once."""

    def close(self) -> None:
        """End the connection."""
        self._connection.release()

    def lost(self) -> Lost | None:
        """None: only `lost_at_the_end` looks."""
        return None

    def lost_at_the_end(self) -> Lost | None:
        """The first file that is missing or was cut short."""
        there = NodeFiles(self._root)
        for path, size in self._sizes.items():
            if not there.exists(path):
                return Lost(path=path, message=f"{path} is no longer there: the file of the node was moved or replaced")
            if there.info(path)["size"] != size:
                return Lost(path=path, message=f"{path} is not as it was written: the file of the node was changed")
        return None

    def discard(self) -> None:
        """Remove what is beside the ranks; the file of the node stays."""
        self.close()
        self._beside.discard()


class _Server:
    """Writes what ranks send to one file.

    Args:
        file: The open file.
        path: Its path.
    """

    def __init__(self, file: UnbufferedFile, path: str) -> None:
        self._file = file
        self._path = path
        self._lock: RecordingLock | None = None
        self._one = threading.Lock()
        self._connections = 0
        self._ranks: set[bytes] = set()
        self._num_frames = 0
        self.has_retired = False
        self._gone = time.monotonic() + START_SECONDS

    def run(self, listening: socket.socket) -> None:
        """Serve ranks until the last one has gone."""
        listening.settimeout(0.2)
        while not self.has_retired and (self._connections or time.monotonic() < self._gone):
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            with self._one:
                self._connections += 1
                self._keep()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError):  # the rank has gone
                message = self._begin(connection)
                connection.sendall(_answer(message))
                while not message:
                    connection.sendall(_answer(self._take(connection)))
        finally:
            with self._one:
                self._connections -= 1
                self._gone = time.monotonic() + IDLE_SECONDS
                self._keep()

    def _keep(self) -> None:
        """Hold the lock of the file while there are ranks: after that, another recording may take its place."""
        if self.has_retired:
            return
        if self._connections and self._lock is None:
            self._lock = RecordingLock(self._path)
        elif not self._connections and self._lock is not None:
            self._lock.release()
            self._lock = None

    def _begin(self, connection: socket.socket) -> str:
        """Take in a rank; the answer is empty, or says why it cannot be."""
        (length,) = _COUNT.unpack(_received(connection, _COUNT.size))
        rank = _received(connection, length)
        with self._one:
            if rank in self._ranks and self._connections == 1:
                return self._retire()
            if rank in self._ranks:
                return f"{rank.decode()} is recorded there by another process, or was"
            self._ranks.add(rank)
        return ""

    def _retire(self) -> str:
        """Give way to the process of a recording that follows, all of whose own have ended."""
        self.has_retired = True
        if self._lock is not None:
            self._lock.release()
        return _OF_ANOTHER

    def _take(self, connection: socket.socket) -> str:
        """Write the next file; the answer is empty, or says what went wrong."""
        length, size = _SIZES.unpack(_received(connection, _SIZES.size))
        name, content = _received(connection, length).decode(), _received(connection, size)
        try:
            with self._one:
                self._write(name, content)
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def _write(self, name: str, content: bytes) -> None:
        """Write one frame, or nothing of it: others follow it."""
        if self._num_frames >= MOST_FRAMES - _ENDINGS and not name.endswith(("/rank.json", GAP_FILE)):
            raise OSError(
                f"the file of the node holds {self._num_frames:,} steps of its ranks, and readers take no more: record "
                "fewer steps (every=...), or leave out per_node"
            )
        self._num_frames += 1
        end = self._file.seek(0, os.SEEK_END)
        try:
            for part in frame(name, content):
                write_all(self._file, part)
        except OSError:
            self._file.truncate(end)
            raise


def _answer(message: str) -> bytes:
    said = message.encode()
    return _COUNT.pack(len(said)) + said


def main(path: str, file: str) -> None:
    """Listen at a path, and write to a new file."""
    with ExitStack() as undo:
        listening = undo.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(path)
        frames = undo.enter_context(UnbufferedFile(file, "xb"))
        listening.listen(64)
        server = _Server(frames, file)
        server.run(listening)
        for one in () if server.has_retired else (path, f"{path}.lock"):  # another process listens there by now
            Path(one).unlink(missing_ok=True)
