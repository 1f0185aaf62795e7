"""Where a recording is: a local path or any fsspec URL."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import fsspec

from traindiff.errors import ConfigError, Problem

DATA = "observations.arrows"
"""File of a rank's observations."""

SEALS = "observations.crc"
"""File of their checksums."""

LONGEST = 150
"""Characters of a file name at most, its ending left out."""

_DIGEST = 16
_UNSAFE = re.compile(r"[^A-Za-z0-9._\-]")
_RESERVED = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\..*)?$|[.~].*$|.*\.$|$")


def file_name(text: str) -> str:
    """A file name for `text`; different texts get different names.

    Letters without accents, digits and `._-` stand for themselves, every other character for the hexadecimal bytes
    of its UTF-8, each behind a `%`. Names that some system reserves (`con`, `..`, a leading dot) begin with
    `%_`. What is longer than `LONGEST` is cut, and ends in `%~` and 16 hexadecimal digits of the SHA-256 of `text`.
    Upper-case letters are kept apart from lower-case ones by the reader, not by a file system that
    ignores case; traindiff's own names begin with a number that is unique.
    """
    name = _UNSAFE.sub(
        lambda match: "".join(f"%{byte:02x}" for byte in match[0].encode("utf-8", "surrogatepass")), text
    )
    if _RESERVED.match(name):
        name = f"%_{name}"
    if len(name) > LONGEST:
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
        name = f"{name[: LONGEST - _DIGEST - 2]}%~{digest}"
    return name


def rank_directory(rank: int) -> str:
    """Name of a rank's directory in a recording."""
    return f"rank-{rank:05d}"


def file_system(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it.

    Raises:
        ConfigError: The protocol is not known, or needs a package that is not installed; or the path is relative to
            a working directory that is gone.
    """
    try:
        file_system, root = fsspec.core.url_to_fs(path)
    except ImportError as error:
        fix = "Install that package where traindiff is installed."
        raise _unreachable(path, f"cannot be reached: {error}.", fix) from None
    except OSError as error:  # the working directory was deleted
        fix = "Write an absolute path, or change to a directory that is there."
        raise _unreachable(path, f"cannot be reached: {error.strerror or error}.", fix) from None
    except ValueError as error:
        fix = f"Write a local path, or a URL of one of: {', '.join(sorted(fsspec.available_protocols())[:12])}, ..."
        raise _unreachable(path, f"cannot be reached: {error}.", fix) from None
    return file_system, root


def _unreachable(path: str, what: str, fix: str) -> ConfigError:
    return ConfigError("the path of a recording", [Problem(where=repr(path), what=what, fix=fix)])
