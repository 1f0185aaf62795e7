"""Checks of the arguments of users in any framework: paths, optimizers, and values to log."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, SupportsFloat

from traindiff.core.site import ROOT, matches
from traindiff.errors import Problem, TraindiffWarning, level_of_caller, type_of


def is_selected(patterns: Iterable[str], path: str) -> bool:
    """True if at least one glob matches a canonical path."""
    return any(matches(pattern, path) for pattern in patterns)


def optimizers_by_name(given: object) -> dict[str, Any]:
    """The optimizers of an argument by name: one, several, or several by name."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, Sequence) and not isinstance(given, str):
        return {f"optimizer[{index}]": one for index, one in enumerate(given)}
    return {"optimizer": given}


def no_match(select: Sequence[str], paths: Sequence[str], *, kinds: str) -> Problem:
    """The problem that `select` matches nothing.

    Args:
        select: As the user gave it.
        paths: All canonical paths of the model.
        kinds: The kinds of objects that have these paths.
    """
    return Problem(
        where=f"record(select={list(select)!r})",
        what=f"matches none of the model's {len(paths)} {kinds}.",
        fix=f"{near(select, paths)}Paths look like: {examples(paths)} Use '*' for all of them.",
    )


def examples(paths: Iterable[str]) -> str:
    """A few of the paths that a user can select."""
    named = [path for path in paths if path] or [ROOT]
    return ", ".join(named[:3]) + (", ..." if len(named) > 3 else ".")


def near(patterns: Iterable[str], paths: Collection[str]) -> str:
    """A suggestion for misspelt patterns; empty if no path is similar."""
    similar = [match for pattern in patterns for match in get_close_matches(pattern.rstrip("*."), list(paths), n=1)]
    return f"Did you mean {similar[0]!r}? " if similar else ""


def warn_of_other_models(
    optimizers: Mapping[str, tuple[str, Iterable[Any]]],
    paths: Collection[str],
    *,
    is_ours: Callable[[Any], bool],
    is_frozen: bool,
    caller: str,
) -> None:
    """Warn of each optimizer that holds parameters, but none of the model's.

    An optimizer that holds some of the model's is right: the others may be frozen. An optimizer without parameters
    belongs to a rank that has none to update. The optimizer of a frozen model may train another one beside it.

    Args:
        optimizers: Class and parameters of each, by its name.
        paths: Canonical paths of the model's parameters.
        is_ours: Returns True if a tensor is, or holds elements of, a parameter of the model.
        is_frozen: None of the model's parameters is trained.
        caller: The function to which the user gave these.
    """
    for name, (kind, parameters) in optimizers.items():
        held = list(parameters)
        if not held or not paths or is_frozen or any(map(is_ours, held)):
            continue
        named = ", ".join([*sorted(paths)[:3], *(["..."] if len(paths) > 3 else [])])
        warnings.warn(
            f"{caller}(optimizer=...), {name}: this {kind} holds {len(held)} parameters, and none of the model's "
            f"{len(paths)} ({named}). Its steps are counted, and what it holds is observed; what changes the model "
            "is not. Give the optimizer of this model; if this is the one, the model's parameters were replaced after "
            "it was made: make it afterwards.",
            TraindiffWarning,
            stacklevel=level_of_caller(),
        )


_logger = logging.getLogger("traindiff")

_MOST_NAMES = 20
"""The most names to warn of: a training may make up a new one in each step."""

_LONGEST_NAME = 200


class NotLoggedError(Exception):
    """A value cannot be recorded; the message is a clause that tells why."""


def number_of(value: object) -> float:
    """A number of Python, NumPy or another library, or the only element of an array, as a float.

    Raises:
        NotLoggedError: It is no number, or too large for a float.
    """
    if isinstance(value, (str, bytes)) or not isinstance(value, SupportsFloat):
        raise NotLoggedError(f"it is {type_of(value)}, not a number")
    size = getattr(value, "size", 1)
    if isinstance(size, int) and size != 1:
        raise NotLoggedError(f"it has {size} elements, not one")
    if isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c":
        raise NotLoggedError("it is a complex number")
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except OverflowError:
        raise NotLoggedError(f"it is {type_of(value)} that is larger than any float") from None
    except Exception as error:  # noqa: BLE001  whatever the class of another library raises
        raise NotLoggedError(f"it is {type_of(value)}, of which float() raises {type(error).__name__}") from None


def weight_of(weight: object) -> float:
    """The weight of a value in a mean.

    Raises:
        NotLoggedError: It is not a finite number.
    """
    try:
        found = number_of(weight)
    except NotLoggedError as error:
        raise NotLoggedError(str(error).replace("it ", "its weight ", 1)) from None
    if not math.isfinite(found):
        raise NotLoggedError(f"its weight is {found}")
    return found


def logged_name(name: object) -> str:
    """The path of a logged value, as valid UTF-8, which is all that a recording holds."""
    return str(name).encode("utf-8", "backslashreplace").decode("utf-8")


NO_NUMBER_GIVEN = (
    "Give it a number, or a tensor with one element. The training is not affected, later calls are recorded, and the "
    "recording says what it lacks."
)
LOG_EARLIER = "Log inside its `with` block, or before its close(). The training is not affected."


def warn_of_refused(name: str, why: str, warned: set[str]) -> None:
    """Warn that a value was not recorded, and why, unless its name is among those `warned` of. Never raises."""
    if name in warned or len(warned) == _MOST_NAMES:
        return
    warned.add(name)
    shown = ascii(name[:_LONGEST_NAME])
    try:
        warnings.warn(f"log({shown}, ...) recorded nothing: {why}", TraindiffWarning, stacklevel=level_of_caller())
    except TraindiffWarning as warning:  # the user turned warnings into errors
        _logger.warning("%s", warning)


def of_one_element(tensor: Any) -> Any:
    """A tensor, or an array, with one element, reshaped to have no axes.

    Raises:
        NotLoggedError: It has not one element, or its layout has no view without axes.
    """
    try:
        shape = tuple(tensor.shape)
        if (num_elements := math.prod(shape)) == 1:
            return tensor.reshape(())
    except Exception as error:  # noqa: BLE001  sparse tensors, nested ones, and those of other libraries
        raise NotLoggedError(f"it is a tensor that cannot be read ({type(error).__name__})") from None
    raise NotLoggedError(f"it is a tensor of {num_elements} elements, of shape {shape}")
