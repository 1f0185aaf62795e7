"""`run.json` and `rank.json`: what a recording says about its run, with a checksum and a version."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

from traindiff.errors import CorruptRecordingError, FormatVersionError, NotARecordingError
from traindiff.recording.documents import RANK, RUN
from traindiff.site import printable
from traindiff.untrusted import demanded, parse, shaped, whole

FORMAT_NAME = "traindiff-recording"
FORMAT_VERSION = 1

Manifest = dict[str, Any]

MIGRATIONS: Mapping[int, Callable[[Manifest], Manifest]] = {}
"""By version: the pure function that turns a `run.json` of that version into one of the next."""


def dump(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as JSON with the checksum of its canonical form in it."""
    return json.dumps(
        {**manifest, "checksum": _checksum(manifest)}, indent=2, ensure_ascii=False, sort_keys=True
    ).encode()


def load(data: bytes, *, where: str) -> Manifest:
    """Parse what `dump` wrote.

    Raises:
        CorruptRecordingError: It is not JSON, would cost too much to parse, or its checksum does not fit.
    """
    return _checked(demanded(parse(data, where=where), shaped({}), where=where), where)


def load_rank(data: bytes, *, where: str) -> Manifest:
    """Parse a `rank.json`.

    Raises:
        CorruptRecordingError: See `load`; or it does not say what a `rank.json` must say.
    """
    content: Manifest = demanded(load(data, where=where), RANK, where=where)
    return content


def _checked(manifest: Manifest, where: str) -> Manifest:
    """A manifest without its checksum, which fits."""
    found = manifest.pop("checksum", None)
    expected = _checksum(manifest)
    if found != expected:
        raise CorruptRecordingError(
            f"{where} is damaged: its checksum is {found}, its content gives {expected}. "
            "Restore the file from where it was copied; it must not be edited."
        )
    return manifest


def load_run(data: bytes, *, where: str) -> Manifest:
    """Parse a `run.json` and bring it to `FORMAT_VERSION`.

    Raises:
        NotARecordingError: JSON of something else.
        FormatVersionError: A newer format than this traindiff reads.
        CorruptRecordingError: See `load`; or it does not say what a `run.json` must say.
    """
    found: Manifest = demanded(parse(data, where=where), shaped({}), where=where)
    if found and found.get("format") != FORMAT_NAME and "checksum" not in found:
        raise _another_format(found, where)
    version = found.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        # Before the checksum: a newer version may compute it otherwise.
        raise FormatVersionError(
            f"{where} has format version {version}; this traindiff reads versions up to {FORMAT_VERSION}. "
            "Update it with: pip install --upgrade traindiff"
        )
    manifest = _checked(found, where)
    if manifest.get("format") != FORMAT_NAME:
        raise _another_format(manifest, where)
    demanded(manifest, shaped({"version": whole(1)}), where=where)
    while (version := manifest["version"]) < FORMAT_VERSION:
        manifest = MIGRATIONS[version](manifest)
    demanded(manifest, RUN, where=where)
    return manifest


def readable(content: Any) -> Any:
    """What is in a manifest, with all texts and keys `printable`.

    Args:
        content: A manifest, or what is in one; is not changed.

    Returns:
        A copy.
    """
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list):
        return [readable(one) for one in content]
    if isinstance(content, dict):
        return {printable(key): readable(value) for key, value in content.items()}
    return content


def framework(run: Mapping[str, Any]) -> tuple[str, str]:
    """The framework that a run was trained with, and its version, by its `run.json`."""
    name = run.get("environment", {}).get("framework", "torch")
    return name, str(run.get("versions", {}).get(name, "unknown"))


def _another_format(manifest: Manifest, where: str) -> NotARecordingError:
    found = printable(repr(manifest.get("format"))[:80])
    return NotARecordingError(
        f'{where} is not of a recording: "format" is {found}, not "{FORMAT_NAME}". '
        "Give the directory that traindiff.record(...) wrote."
    )


def _checksum(manifest: Mapping[str, Any]) -> str:
    canonical = json.dumps(manifest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return f"crc32:{zlib.crc32(canonical.encode(errors='surrogatepass')):08x}"
