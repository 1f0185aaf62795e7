"""Object stores (S3, Google Cloud Storage, Azure, ...) as file systems whose errors say what to do.

Each store's package raises errors of its own, many of which are no `OSError`. Here they all become `StoreError`.
"""

from __future__ import annotations

import errno
import functools
import posixpath
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from traindiff.storage.written_files import UNFINISHED

EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs",
    "az": "az", "abfs": "az", "abfss": "az", "adl": "az",
}  # fmt: skip
"""Extra of traindiff that installs a protocol's package."""

_ATOMIC = frozenset({*EXTRAS, "memory"})
"""Protocols of stores where a file appears when it is complete."""

_CREDENTIALS = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN for temporary ones), or AWS_PROFILE.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS to the file of a service account's key, or log in with: "
    "gcloud auth application-default login.",
    "az": "Set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY.",
}
_ENDPOINT = {
    "s3": "Check the network, and AWS_ENDPOINT_URL and AWS_DEFAULT_REGION if they are set.",
    "gs": "Check the network, and STORAGE_EMULATOR_HOST if it is set.",
    "az": "Check the network, and the name of the account.",
}
_CONTAINER = {"s3": "bucket", "gs": "bucket", "az": "container"}

_NO_CREDENTIALS = (
    "NoCredentials", "PartialCredentials", "DefaultCredentials", "CredentialRetrieval", "TokenRetrieval",
    "ProfileNotFound", "Must provide either a connection_string",
)  # fmt: skip
_REFUSED = (
    "ExpiredToken", "expired", "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed",
    "Unauthorized", "Access Key Id you provided does not exist", "Invalid Credentials",
)  # fmt: skip
_UNREACHABLE = (
    "EndpointConnection", "ConnectTimeout", "ReadTimeout", "ConnectionClosed", "ClientConnector", "ServerDisconnected",
    "ServiceRequest", "ConnectionRefused", "ConnectionReset", "gaierror", "SSLError", "HTTPClientError",
    "FSTimeoutError", "InvalidEndpoint", "Invalid endpoint",
)  # fmt: skip
_NO_CONTAINER = ("NoSuchBucket", "bucket does not exist", "ContainerNotFound", "container does not exist")
_LONGEST_CAUSE = 300


class StoreError(OSError):
    """An object store refused something or could not be reached. Its message says where, what, and what to do.

    Attributes:
        what: What happened, as a clause with the store's own words.
        fix: What to do about it, a sentence.
        lasts: True if trying again does not help: it is about credentials, rights, or the bucket.
    """

    def __init__(self, path: str, *, what: str, fix: str, lasts: bool) -> None:
        super().__init__(errno.EACCES if lasts else errno.EIO, what)
        self.path, self.what, self.fix, self.lasts = path, what, fix, lasts

    def __str__(self) -> str:
        return f"{self.path}: {self.what}. {self.fix}"


class Store:
    """An fsspec file system that is not local, with errors that say what to do.

    Calls go to the file system's methods of the same names. A file that does not exist stays a `FileNotFoundError`.
    Listings are never taken from a cache, because recordings grow.

    Args:
        file_system: The fsspec file system.
        protocol: The protocol of its URLs.
    """

    def __init__(self, file_system: Any, protocol: str) -> None:
        self.wrapped = file_system
        self.protocol = protocol
        self.exists = self._calling("exists")
        self.isdir = self._calling("isdir")
        self.info = self._calling("info")
        self.size = self._calling("size")
        self.find = self._calling("find")
        self.cat_file = self._calling("cat_file")
        self._ranges = self._calling("cat_ranges")
        self._pipe = self._calling("pipe")
        self.rm = self._calling("rm")
        self._list = self._calling("ls")

    def ls(self, path: str, *, detail: bool = True) -> Any:
        """The entries of a directory as they are now."""
        self.forget()
        return self._list(path, detail=detail)

    def forget(self) -> None:
        """Forget all listings, from which the file system would also answer what is there and how large it is."""
        self.wrapped.invalidate_cache()

    def put_files(self, files: Mapping[str, bytes]) -> None:
        """Write whole files, several at once where the store can: a reader sees an old or a new one, never a part."""
        if self.protocol in _ATOMIC:
            try:
                self._pipe(dict(files))
            except FileNotFoundError as error:  # what gcsfs says of a bucket
                raise self.lacks_container(next(iter(files))) or error from error
            return
        for path, content in files.items():
            self._calling("makedirs")(posixpath.dirname(path), exist_ok=True)
            self._pipe({path + UNFINISHED: content})
            self._calling("mv")(path + UNFINISHED, path)

    @property
    def has_containers(self) -> bool:
        """True if the first part of a path is a bucket or a container, which traindiff never makes."""
        return self.protocol in EXTRAS

    def lacks_container(self, path: str) -> StoreError | None:
        """The error for a path whose bucket does not exist; None if it does, or if there are none."""
        bucket = path.lstrip("/").partition("/")[0]
        if not self.has_containers or not bucket or self.exists(bucket):
            return None
        return no_container(self.protocol, bucket)

    def cat_ranges(
        self, paths: list[str], starts: list[int], ends: list[int], *, on_error: str = "return"
    ) -> list[Any]:
        """Several ranges, as they are or as errors."""
        found = self._ranges(paths, starts, ends, on_error=on_error)
        return [
            self._said(one, path) if isinstance(one, Exception) else one for path, one in zip(paths, found, strict=True)
        ]

    def _said(self, error: Exception, path: str) -> Exception:
        """The error to raise for an error of the file system."""
        missing = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
        return error if missing and not is_about_container(error) else explained(error, self.protocol, path)

    def _calling(self, name: str) -> Callable[..., Any]:
        method = getattr(self.wrapped, name)

        @functools.wraps(method)
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not threading.main_thread().is_alive():
                _connect_without_threads(self.wrapped)
            try:
                return method(path, *args, **kwargs)
            except Exception as error:
                first = path if isinstance(path, str) else next(iter(path), "")
                said = self._said(error, str(first))
                if said is error:
                    raise
                raise said from error

        return call


class _Here(ThreadPoolExecutor):
    """Runs at once, in the calling thread, what it is given."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """A future that is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  it belongs to whoever asks for the result
            future.set_exception(error)
        return future


def _connect_without_threads(file_system: Any) -> None:
    """Let a file system open connections while Python exits.

    A new connection looks up an address by an executor of asyncio. Executors take nothing more once the main thread
    has ended, and that is before functions of `atexit` are called.
    """
    from fsspec.asyn import AsyncFileSystem

    if isinstance(file_system, AsyncFileSystem):
        loop = file_system.loop
        loop.call_soon_threadsafe(loop.set_default_executor, _Here())


def explained(error: BaseException, protocol: str, path: str) -> StoreError:
    """An error of a store's package in words that help.

    Args:
        error: What the package raised.
        protocol: The protocol of the URL.
        path: The URL without its protocol.
    """
    family, bucket = EXTRAS.get(protocol, ""), path.lstrip("/").partition("/")[0]
    url, cause = url_of(protocol, path), _cause(error)
    if _is_any(error, _NO_CONTAINER):
        return no_container(protocol, bucket)
    if _is_any(error, _NO_CREDENTIALS):
        fix = _CREDENTIALS.get(family, "Give the credentials that the store's package asks for.")
        return StoreError(url, what=f"there are no credentials ({cause})", fix=fix, lasts=True)
    if _is_any(error, _REFUSED):
        fix = _CREDENTIALS.get(family, "Renew the credentials.")
        return StoreError(url, what=f"the credentials are not accepted ({cause})", fix=fix, lasts=True)
    if isinstance(error, PermissionError) or _is_any(error, ("Forbidden", "AccessDenied")):
        where = url_of(protocol, bucket)
        fix = f"Allow these credentials to list, read and write in {where}, or renew them if they have expired."
        return StoreError(url, what=f"access is denied ({cause})", fix=fix, lasts=True)
    if isinstance(error, ConnectionError | TimeoutError) or _is_any(error, _UNREACHABLE):
        fix = _ENDPOINT.get(family, "Check the network and the address of the store.")
        return StoreError(url, what=f"the store does not answer ({cause})", fix=fix, lasts=False)
    fix = "Try again later; if it lasts, look into the store's own log."
    return StoreError(url, what=f"the store reports an error ({cause})", fix=fix, lasts=False)


def no_container(protocol: str, bucket: str) -> StoreError:
    """The error for a bucket that does not exist."""
    container = _CONTAINER.get(EXTRAS.get(protocol, ""), "bucket")
    fix = f"Make it first, or correct the name; traindiff makes no {container}s."
    return StoreError(url_of(protocol, bucket), what=f"there is no {container} {bucket!r}", fix=fix, lasts=True)


def url_of(protocol: str, path: str) -> str:
    """The URL of a path in a store."""
    return f"{protocol}://{path.lstrip('/')}"


def is_about_container(error: BaseException) -> bool:
    """True if the error says that there is no such bucket."""
    return _is_any(error, _NO_CONTAINER)


def _is_any(error: BaseException | None, words: tuple[str, ...]) -> bool:
    """True if the error, or one that it comes from, has a class or a message with one of the words."""
    seen = 0
    while error is not None and seen < 8:
        text = f"{' '.join(one.__name__ for one in type(error).__mro__)} {error}"
        if any(word in text for word in words):
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())[:_LONGEST_CAUSE].rstrip(".")
    name = type(error).__name__
    return name if not text else text if isinstance(error, OSError) else f"{name}: {text}"


def protocol_of(path: str) -> str:
    """The protocol of a URL; empty for a local path."""
    return path.partition("://")[0] if "://" in path else ""


def missing_package(path: str) -> str:
    """The advice for a URL whose package is not installed."""
    extra = EXTRAS.get(protocol_of(path))
    if extra is None:
        return "Install that package where traindiff is installed."
    return f"Run pip install 'traindiff[{extra}]' where traindiff is installed."


def opened(path: str) -> tuple[Any, str]:
    """The fsspec file system of a URL as it is now, and the path in it.

    fsspec is loaded for URLs only: it takes 60 ms. Its file systems are kept for the whole process, with what they have
    listed; that is forgotten here, because there may be more by now.

    Raises:
        Exception: The package of the protocol is missing, or it raised an error of its own.
    """
    import fsspec

    file_system, root = fsspec.core.url_to_fs(path)
    file_system.invalidate_cache()
    return file_system, root


def known() -> Collection[str]:
    """The protocols that fsspec knows, whether or not their packages are installed."""
    import fsspec

    return frozenset(fsspec.available_protocols())


def is_known(protocol: str) -> bool:
    """True if fsspec knows a protocol, whether or not its package is installed."""
    return protocol in known()


def is_local(file_system: Any) -> bool:
    """True if a file system of fsspec is that of this machine."""
    from fsspec.implementations.local import LocalFileSystem

    return isinstance(file_system, LocalFileSystem)
