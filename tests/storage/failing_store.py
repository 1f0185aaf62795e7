"""An object store in memory that can be told to fail: `s3://bucket/...`, without a server and without s3fs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

Refuse = Callable[[str, str], None]
"""Given the name of a method and a path: raises an error, or does nothing."""


class ClientError(Exception):
    """An error as those of a store's package: no OSError."""


class FailingStore(MemoryFileSystem):
    """Files in memory, apart from those of `memory://`.

    Attributes:
        refuse: Called before each request.
        requests: The method and path of each request so far.
    """

    cachable = False
    protocol = "s3"
    store: dict[str, Any] = {}  # noqa: RUF012  as in the class above
    pseudo_dirs = [""]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.store = {}
        self.pseudo_dirs = [""]
        self.refuse: Refuse = lambda _method, _path: None
        self.requests: list[tuple[str, str]] = []
        self.makedirs("/bucket")

    def _asked(self, method: str, path: str) -> None:
        self.requests.append((method, path))
        self.refuse(method, path)

    def exists(self, path: str, **kwargs: Any) -> bool:
        self._asked("exists", path)
        return bool(super().exists(path, **kwargs))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        self._asked("ls", path)
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> Any:
        self._asked("cat_file", path)
        return super().cat_file(path, start=start, end=end, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        self._asked("pipe_file", path)
        super().pipe_file(path, value, **kwargs)

    def rm(self, path: Any, **kwargs: Any) -> None:
        for one in [path] if isinstance(path, str) else path:
            self._asked("rm", one)
        super().rm(path, **kwargs)


def failing(error: Exception, method: str = "") -> Refuse:
    """Every request fails, or every one of a method."""

    def refuse(asked: str, _path: str) -> None:
        if method in ("", asked):
            raise error

    return refuse


def s3_in_memory(patched: pytest.MonkeyPatch) -> FailingStore:
    """A store for all URLs that begin with `s3://`; it has the bucket `bucket`."""
    store, others = FailingStore(), fsspec.core.url_to_fs

    def url_to_fs(path: str) -> tuple[Any, str]:
        return (store, "/" + path.removeprefix("s3://")) if path.startswith("s3://") else others(path)

    patched.setattr(fsspec.core, "url_to_fs", url_to_fs)
    return store
