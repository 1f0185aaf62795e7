"""Classes that users are given and never make themselves."""

from __future__ import annotations

import re
from inspect import Parameter, Signature
from typing import TypeVar

_Class = TypeVar("_Class", bound=type)

_ARGUMENTS = re.compile(r"\n    Args:\n(?:        .*\n|\n(?=        ))+")


def made_inside(made: _Class) -> _Class:
    """Class decorator that has `help` and `inspect.signature` leave out the arguments, which are traindiff's own."""
    made.__signature__ = Signature()  # type: ignore[attr-defined]
    made.__init__.__signature__ = Signature([Parameter("self", Parameter.POSITIONAL_ONLY)])  # type: ignore[misc]
    if made.__doc__:  # there is none under python -OO
        made.__doc__ = _ARGUMENTS.sub("", made.__doc__)
    return made
