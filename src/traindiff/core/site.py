"""Sites of tensors: canonical paths of modules and parameters, and the phases of a step."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

PHASES = ("batch", "forward", "loss", "backward", "grad", "optimizer", "update", "param")
"""What can be observed in a step, in dataflow order."""

ROOT = "(root)"
"""Spelling of the root module's empty path for people."""

WRAPPERS = frozenset(
    {
        "module",  # DistributedDataParallel, DataParallel, DeepSpeedEngine
        "_orig_mod",  # torch.compile
        "_fsdp_wrapped_module",  # FullyShardedDataParallel
        "_fpw_module",  # FullyShardedDataParallel, torch 1.x
        "_checkpoint_wrapped_module",  # checkpoint_wrapper
        "_torch_module",  # ORTModule
        "_original_module",  # ORTModule
        "_flattened_module",  # ORTModule
        "_forward_module",  # Lightning Fabric; beside it, `_original_module` holds the same model without its engine
    }
)
"""Path components that wrappers insert; the same tensor has the same site with and without them."""

_PART = re.compile(r"_traindiff_part_\d+")


def part_name(number: int) -> str:
    """Name under which one part of a model is held when the model is recorded in several parts; paths leave it out."""
    return f"_traindiff_part_{number}"


def path_in_whole(path: str) -> str:
    """`path` without the name of a part of the model."""
    first, _, rest = path.partition(".")
    return rest if _PART.fullmatch(first) else path


_OF_NO_MODULE = re.compile(r".*\.groups\[\d+\]\.params\[\d+\]")


def path_in_optimizer(optimizer: str, group: int, position: int) -> str:
    """Path of a parameter that an optimizer holds and no module of the model: by its group and its position there."""
    return f"{optimizer}.groups[{group}].params[{position}]"


def is_of_no_module(path: str) -> bool:
    """True for the path of a parameter that no module of the model holds."""
    return _OF_NO_MODULE.fullmatch(path) is not None


class _Escapes(dict[int, int | str]):
    """Table for `str.translate` that maps a character to itself or to its escape; it caches the first ones."""

    def __missing__(self, code: int) -> int | str:
        one = chr(code)
        found = code if one.isprintable() else one.encode("unicode_escape").decode()
        if len(self) < _MOST_KEPT:
            self[code] = found
        return found


_MOST_KEPT = 4096
_ESCAPES = _Escapes()


def printable(text: str) -> str:
    r"""`text` on one line, without control codes for a terminal: names may hold anything.

    Args:
        text: Any text, also one that is not valid Unicode.

    Returns:
        The text with an escape (`\n`, `\x1b`, `\u202e`) for each character that is not `str.isprintable`. A second call
        changes nothing.
    """
    if text.isprintable():
        return text
    return text.translate(_ESCAPES)


def canonical_path(path: str) -> str:
    """`path` without the components that wrappers insert, `printable`."""
    kept = (part for part in path.split(".") if part not in WRAPPERS and not _PART.fullmatch(part))
    return printable(".".join(kept))


def enclosing(path: str) -> list[str]:
    """A path, and the paths of all modules around it, innermost first; the last is that of the root, which is empty."""
    found = [path]
    while path:
        path = path.rpartition(".")[0]
        found.append(path)
    return found


def canonical_paths(paths: Iterable[str]) -> dict[str, str]:
    """Map each module or parameter path to its canonical path.

    A wrapper and the module inside it have the same canonical path. The innermost module gets it and the wrapper is
    left out, so that nothing is observed twice. A wrapper may hold one module under two names, of which one is left
    out. If two modules that do not contain each other would get the same path (a model may have a layer that is really
    called `module`), all of them keep their own paths.

    Args:
        paths: Distinct paths as `named_modules` or `named_parameters` spell them. A mapping tells what is at each, so
            that two names of one object can be told from two objects.

    Returns:
        Canonical paths by original path, in the order of `paths`.
    """
    by_canonical: dict[str, list[str]] = {}
    order = list(paths)
    for path in order:
        by_canonical.setdefault(canonical_path(path), []).append(path)
    chosen: dict[str, str] = {}
    for canonical, found in by_canonical.items():
        originals = _of_one_object_each(found, paths) if isinstance(paths, Mapping) else found
        innermost = max(originals, key=len)
        if all(_contains(path, innermost) for path in originals):
            chosen[innermost] = canonical
        else:
            chosen.update((path, path) for path in originals)
    return {path: chosen[path] for path in order if path in chosen}


def _of_one_object_each(paths: Iterable[str], objects: Mapping[str, object]) -> list[str]:
    """The longest path of each object: another wrapper may be around it there."""
    return list({id(objects[path]): path for path in sorted(paths, key=len)}.values())


def _contains(outer: str, inner: str) -> bool:
    return outer == inner or outer == "" or inner.startswith(outer + ".")


def matches(pattern: str, path: str) -> bool:
    """True if a glob of the user matches a canonical path; the root matches `(root)` and `*`."""
    pattern = printable(pattern)  # as paths are
    return fnmatchcase(path or ROOT, pattern) or (not path and pattern == "*")


def label(path: str, slot: str) -> str:
    """A site in readable form: `transformer.h.3.mlp output[0]`."""
    return f"{path or ROOT} {slot}".rstrip()
