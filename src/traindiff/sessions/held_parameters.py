"""Whether the optimizers that were given hold parameters of the model that was given."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from traindiff.errors import TraindiffWarning, level_of_caller

_EXAMPLES = 3


def warn_of_other_models(
    optimizers: Mapping[str, tuple[str, Iterable[Any]]],
    paths: Collection[str],
    *,
    is_ours: Callable[[Any], bool],
    is_frozen: bool,
    caller: str,
) -> None:
    """Warn of each optimizer that holds parameters, and none of the model's.

    One that holds some of them is right: the others may be frozen. One that holds no parameter at all belongs to a
    rank that has none to update. A model that is frozen has no optimizer: this one may train what is beside it.

    Args:
        optimizers: Class and parameters of each, by its name.
        paths: Canonical paths of the model's parameters.
        is_ours: Whether a parameter is, or holds, some of the model's.
        is_frozen: Whether none of the model's parameters is trained.
        caller: The function to which the user gave these.
    """
    for name, (kind, parameters) in optimizers.items():
        held = list(parameters)
        if not held or not paths or is_frozen or any(map(is_ours, held)):
            continue
        examples = ", ".join([*sorted(paths)[:_EXAMPLES], *(["..."] if len(paths) > _EXAMPLES else [])])
        warnings.warn(
            f"{caller}(optimizer=...), {name}: this {kind} holds {len(held)} parameters, and none of the model's "
            f"{len(paths)} ({examples}). Its steps are counted, and what it holds is observed; what changes the model "
            "is not. Give the optimizer of this model; if this is the one, the model's parameters were replaced after "
            "it was made: make it afterwards.",
            TraindiffWarning,
            stacklevel=level_of_caller(),
        )
