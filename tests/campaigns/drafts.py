"""An input taken apart so that it can be changed and put together again, with right checksums where that is wanted."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.campaigns.seeds import Files
from traindiff.storage.gap import GAP_FILE

_SEAL = re.compile(rb"(\d+) (\d+) [0-9a-f]{8}\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Special:
    """What is no regular file: it takes the place of a file, or of a directory with all that is in it."""

    kind: Literal["fifo", "socket", "directory", "link", "gone"]
    target: str = ""


Tree = dict[str, bytes | Special]
"""What a mutant is on disk, by path. A special one is put in place last."""


@dataclass(slots=True, kw_only=True)
class Stream:
    """The stream of a rank.

    Attributes:
        messages: In their order.
        seals: Content of `observations.crc`; computed where it is None.
        tail: What lies behind the messages.
        changed: Whether a message is another one than a writer made.
    """

    messages: list[bytes]
    seals: bytes | None = None
    tail: bytes = b""
    changed: bool = False

    @classmethod
    def parsed(cls, data: bytes, seals: bytes) -> Stream:
        """Take a stream apart where its seals say so; what was cut off is the tail."""
        messages, end = [], 0
        for match in _SEAL.finditer(seals):
            offset, length = int(match[1]), int(match[2])
            if offset + length > len(data):
                return cls(messages=messages, seals=seals, tail=data[offset:])
            messages.append(data[offset : offset + length])
            end = offset + length
        return cls(messages=messages, tail=data[end:])

    def sealed(self) -> bytes:
        """The lines of `observations.crc`, which fit the messages as they are now."""
        lines, offset = [], 0
        for message in self.messages:
            lines.append(b"%d %d %08x\n" % (offset, len(message), zlib.crc32(message)))
            offset += len(message)
        return b"".join(lines)


@dataclass(slots=True)
class Draft:
    """A recording's files, or another tool's, of which those are taken apart that have a structure.

    Attributes:
        files: Those that are kept as bytes.
        manifests: JSON texts without their checksums, by path, which get one.
        streams: By directory of the rank.
        specials: What is put in place last.
    """

    files: Files = field(default_factory=dict)
    manifests: dict[str, str] = field(default_factory=dict)
    streams: dict[str, Stream] = field(default_factory=dict)
    specials: dict[str, Special] = field(default_factory=dict)

    @classmethod
    def of(cls, seed: Files) -> Draft:
        """Take a seed apart."""
        draft = cls(files=dict(seed))
        for path in seed:
            folder, _, name = path.rpartition("/")
            if name in ("run.json", "rank.json", GAP_FILE):
                content = json.loads(draft.files.pop(path))
                del content["checksum"]
                draft.manifests[path] = json.dumps(content, ensure_ascii=False)
            elif name == "observations.arrows":
                data, seals = draft.files.pop(path), draft.files.pop(f"{folder}/observations.crc")
                draft.streams[folder] = Stream.parsed(data, seals)
        return draft

    def tree(self) -> Tree:
        """Put it together."""
        found: Tree = dict(self.files)
        for path, text in self.manifests.items():
            found[path] = with_checksum(text)
        for folder, stream in self.streams.items():
            found[f"{folder}/observations.arrows"] = b"".join(stream.messages) + stream.tail
            found[f"{folder}/observations.crc"] = stream.sealed() if stream.seals is None else stream.seals
        found.update(self.specials)
        return found


def with_checksum(text: str) -> bytes:
    """A JSON object with the checksum that FORMAT.md gives it; what is no object stays as it is."""
    data = text.encode("utf-8", "surrogatepass")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        return data
    content.pop("checksum", None)
    try:
        canonical = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return data
    seal = f'"checksum": "crc32:{zlib.crc32(canonical.encode("utf-8", "surrogatepass")):08x}"'
    body = text.rstrip()[:-1].rstrip()
    comma = "" if body.endswith("{") else ", "
    return f"{body}{comma}{seal}}}".encode("utf-8", "surrogatepass")


def paths_of(tree: Tree) -> Iterator[str]:
    """Every path of a tree, directories included."""
    seen: set[str] = set()
    for path in tree:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            one = "/".join(parts[:end])
            if one not in seen:
                seen.add(one)
                yield one


Json = Any
"""What JSON can hold."""
