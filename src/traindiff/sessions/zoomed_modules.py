"""Modules whose operators are recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from torch import nn

from traindiff.errors import ConfigError, Problem
from traindiff.site import ROOT, matches
from traindiff.taps._torch_compat import is_compiled


def zoomed_modules(patterns: Sequence[str], modules: Mapping[str, nn.Module], root: nn.Module) -> dict[str, nn.Module]:
    """The modules that patterns choose, and all that these hold.

    Args:
        patterns: Globs over canonical paths.
        modules: All modules of the model by canonical path.
        root: The model, wrapped or not.

    Returns:
        By canonical path, in the order of `modules`.

    Raises:
        ConfigError: A pattern matches no module, or a part of what was chosen is compiled.
    """
    problems = [
        Problem(
            where=f"record(operators={pattern!r})",
            what=f"matches none of the model's {len(modules)} modules.",
            fix=f"{_near(pattern, modules)}Modules are called like: {_examples(modules)}",
        )
        for pattern in patterns
        if not any(matches(pattern, path) for path in modules)
    ]
    chosen = [path for path in modules if any(matches(pattern, path) for pattern in patterns)]
    found = {path: module for path, module in modules.items() if any(_holds(outer, path) for outer in chosen)}
    if _is_partly_compiled(found, root):
        problems.append(
            Problem(
                where=f"record(operators={list(patterns)!r})",
                what="is in a part of the model that is compiled, and compiled code runs no operators one by one.",
                fix="Record the same training without torch.compile, or compare modules alone.",
            )
        )
    if problems:
        raise ConfigError("record(...)", problems, consequence="nothing was attached to the model")
    return found


def _holds(outer: str, path: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def _is_partly_compiled(found: Mapping[str, nn.Module], root: nn.Module) -> bool:
    """Whether one of the modules is compiled, or a part of what is."""
    compiled = (one for module in root.modules() if is_compiled(module) for one in module.modules())
    return not {id(module) for module in found.values()}.isdisjoint(map(id, compiled))


def _near(pattern: str, modules: Mapping[str, nn.Module]) -> str:
    near = get_close_matches(pattern.rstrip("*."), list(modules), n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def _examples(modules: Mapping[str, nn.Module]) -> str:
    named = [path for path in modules if path] or [ROOT]
    return ", ".join(named[:3]) + (", ..." if len(named) > 3 else ".")
