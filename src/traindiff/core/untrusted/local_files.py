"""The local file system, with the methods that traindiff uses of fsspec's file systems.

fsspec takes a sixth of the time in which `traindiff compare` starts, so it is loaded for URLs only.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any


class LocalFiles:
    """Directories and files of this machine."""

    def exists(self, path: str) -> bool:
        """True if there is a file or a directory; a link counts as what it leads to."""
        return os.path.exists(path)  # noqa: PTH110  Path raises an error for names that no file system has

    def isdir(self, path: str) -> bool:
        """True if there is a directory, or a link that leads to one."""
        return os.path.isdir(path)  # noqa: PTH112

    def info(self, path: str) -> dict[str, Any]:
        """Size in bytes of a file or a directory.

        Raises:
            OSError: It does not exist, or may not be asked for.
        """
        return {"size": Path(path).stat().st_size}

    def ls(self, path: str, *, detail: bool = False) -> list[Any]:
        """Paths of the entries of a directory; of a file, its own path.

        Raises:
            OSError: There is nothing, or it may not be read.
        """
        assert not detail, "asked for stores only"
        if not self.isdir(path):
            Path(path).lstat()
            return [path]
        return [str(one) for one in Path(path).iterdir()]

    def cat_file(self, path: str) -> bytes:
        """The content of a file.

        Raises:
            OSError: It does not exist, or may not be read.
        """
        return Path(path).read_bytes()

    def rm(self, path: str, *, recursive: bool = False) -> None:
        """Remove a file, a link, or a directory with all that is in it if `recursive`.

        Raises:
            OSError: It does not exist, may not be removed, or is a directory and not `recursive`.
        """
        if recursive and self.isdir(path) and not Path(path).is_symlink():
            shutil.rmtree(path)
        else:
            Path(path).unlink()


def local_path(path: str) -> str | None:
    """A path of this machine as an absolute one; None for what fsspec must take apart: URLs, and paths of Windows.

    Raises:
        OSError: It is relative to a working directory that no longer exists.
    """
    if os.sep != "/" or "://" in path or "::" in path or path.startswith(("file:", "local:")):
        return None
    if path.startswith("~"):
        whole = os.path.expanduser(path)  # noqa: PTH111  Path raises an error for users that do not exist
    else:
        whole = path if path.startswith("/") else f"{os.getcwd()}/{'' if path == '.' else path.removeprefix('./')}"  # noqa: PTH109
    return whole.rstrip("/") or "/"
