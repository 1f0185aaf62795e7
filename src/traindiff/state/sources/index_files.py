"""Several files with an index that says which tensor is in which, as Hugging Face's libraries write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from traindiff.core.site import printable
from traindiff.core.untrusted.demands import TEXT, demanded, mapped, parse, quoted, shaped
from traindiff.core.untrusted.folder import Folder
from traindiff.state.stored import StoredTensor, unreadable

MOST_INDEX_BYTES = 1 << 26
"""Limit for the size of an index."""

_INDEX = shaped({"weight_map": mapped(TEXT)})
_MOST_NAMED = 3


def of_index(
    folder: Folder, name: str, read: Callable[[Folder, str], Mapping[str, StoredTensor]]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """The tensors of several files, by name, and notes.

    Args:
        folder: The directory.
        name: The index.
        read: Reads one of the files.

    Raises:
        CheckpointError: A file is missing or damaged, or lacks a tensor that the index says it has.
    """
    where = folder.path(name)
    text = folder.read(name, limit=MOST_INDEX_BYTES)
    content = parse(text, where=where, refuse=unreadable, most_bytes=MOST_INDEX_BYTES)
    index: dict[str, str] = demanded(content, _INDEX, where=where, refuse=unreadable)["weight_map"]
    files: dict[str, Mapping[str, StoredTensor]] = {}
    found: dict[str, StoredTensor] = {}
    for key, file in index.items():
        if file not in files:
            if not folder.exists(file):
                raise unreadable(where, f"it says that {quoted(key)} is in {quoted(file)}, which is not there")
            files[file] = read(folder, file)
        if printable(key) not in files[file]:
            raise unreadable(folder.path(file), f"it lacks {quoted(key)}, which {quoted(name)} says is there")
        found[printable(key)] = files[file][printable(key)]
    return found, _notes(folder, name, [(file, key) for file in files for key in files[file] if key not in found])


def _notes(folder: Folder, name: str, extra: list[tuple[str, str]]) -> list[str]:
    notes = [
        f"{folder.path(file)} has {quoted(key)}, which is not in {quoted(name)}: loaders ignore it, and so does this."
        for file, key in extra[:_MOST_NAMED]
    ]
    if len(extra) > _MOST_NAMED:
        notes.append(f"The same holds for {len(extra) - _MOST_NAMED} more tensors of {folder.root}.")
    return notes
