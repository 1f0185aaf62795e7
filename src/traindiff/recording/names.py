"""Any text as a file name: injective, safe on every file system, readable where it can be."""

from __future__ import annotations

import hashlib
import re

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
