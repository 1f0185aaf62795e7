"""Mutants that a reader once failed on, kept beside this file and read again by every run of the tests.

Each is an archive: what was on disk, links and FIFOs included,
and in a header the name of its reader. It does not depend
on how mutants are made today.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.drafts import Special, Tree
from tests.campaigns.judging import Failure
from tests.campaigns.workers import Judged, Kept

DIRECTORY = Path(__file__).parent / "corpus"
MOST_BYTES = 20_000
"""Size of an archive; of a larger mutant the number is kept in the report, and no file."""

_KINDS = {"fifo": tarfile.FIFOTYPE, "directory": tarfile.DIRTYPE, "link": tarfile.SYMTYPE}
_ABOUT = "traindiff.about"
"""Header of an archive: what a tar archive does not hold, sockets among it."""


def keep(found: Judged, tree: Tree, *, kind: str, directory: Path = DIRECTORY) -> Path | None:
    """Put a mutant into the corpus; None where it is too large for it."""
    assert found.failure is not None
    about = {
        "kind": kind, "seed": found.seed, "reader": found.reader,
        "failed": f"{found.failure.kind}: {found.failure.place}",
        "sockets": [path for path, one in tree.items() if isinstance(one, Special) and one.kind == "socket"],
        "gone": [path for path, one in tree.items() if isinstance(one, Special) and one.kind == "gone"],
    }  # fmt: skip
    file = io.BytesIO()
    with tarfile.open(
        fileobj=file, mode="w:xz", format=tarfile.PAX_FORMAT, pax_headers={_ABOUT: json.dumps(about)}
    ) as archive:
        for path, content in tree.items():
            info = tarfile.TarInfo(path)
            if isinstance(content, bytes):
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
            elif content.kind in _KINDS:
                info.type, info.linkname = _KINDS[content.kind], content.target
                archive.addfile(info)
    if len(file.getvalue()) > MOST_BYTES:
        return None
    directory.mkdir(exist_ok=True)
    path = directory / f"{_name(found.reader, found.failure)}.tar.xz"
    path.write_bytes(file.getvalue())
    return path


def _name(reader: str, failure: Failure) -> str:
    place = re.sub(r":\d+", "", f"{failure.kind} {failure.place}")
    return re.sub(r"[^a-z0-9]+", "-", f"{reader} {place}".lower()).strip("-")[:120]


def load(path: Path) -> Kept:
    """A mutant of the corpus."""
    tree: Tree = {}
    kinds = {value: name for name, value in _KINDS.items()}
    with tarfile.open(path) as archive:
        about = json.loads(archive.pax_headers[_ABOUT])
        for info in archive:
            if info.isreg():
                file = archive.extractfile(info)
                assert file is not None
                tree[info.name] = file.read()
            else:
                tree[info.name] = Special(kind=kinds[info.type], target=info.linkname)  # type: ignore[arg-type]
    tree |= {name: Special(kind="socket") for name in about["sockets"]}
    tree |= {name: Special(kind="gone") for name in about["gone"]}
    return Kept(
        name=path.name.removesuffix(".tar.xz"), kind=about["kind"], seed=about["seed"], reader=about["reader"],
        failed=about["failed"], tree=tree,
    )  # fmt: skip


def everything(directory: Path = DIRECTORY) -> Iterator[Kept]:
    """The whole corpus, in the order of names."""
    for path in sorted(directory.glob("*.tar.xz")):
        yield load(path)
