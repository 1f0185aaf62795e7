"""Checksums that files have for their tensors: looked at where a tensor differs, before anything is said of it."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from traindiff.core.untrusted.demands import quoted
from traindiff.state.measured import MOST_THREADS
from traindiff.state.stored import Seal, StoredTensor, unreadable


def check_seals(tensors: Mapping[str, StoredTensor], names: Collection[str]) -> None:
    """Check the checksums of tensors, where their files have some.

    A checksum takes five times as long as a comparison. Tensors that both sides have are as they were saved.

    Args:
        tensors: Of one side, by name.
        names: Those to check; others are ignored.

    Raises:
        CheckpointError: One does not hold: the file is damaged.
    """
    seals: dict[tuple[str, int], tuple[Seal, str]] = {}
    for name in names:
        for one in _seals(tensors[name]) if name in tensors else ():
            content = one.content
            seals.setdefault((content.folder.path(content.name), content.offset), (one, name))
    with ThreadPoolExecutor(max_workers=min(MOST_THREADS, os.cpu_count() or 1)) as pool:
        for (where, _), (_, name), holds in zip(
            seals, seals.values(), pool.map(lambda pair: pair[0].holds(), seals.values()), strict=True
        ):
            if not holds:
                raise unreadable(where, f"{quoted(name)} does not have the checksum that the file has for it")


def _seals(tensor: StoredTensor) -> Iterator[Seal]:
    for part in tensor.parts:
        seal = part.find().seal
        if seal is not None:
            yield seal
    for one in tensor.made_of:
        yield from _seals(one)
