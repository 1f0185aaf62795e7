"""Follow the calls of one object's method, where there is no hook for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any


def around(
    owner: Any,
    name: str,
    *,
    before: Callable[..., None] = lambda *_, **__: None,
    after: Callable[[Any], None] = lambda _: None,
) -> ExitStack:
    """Call functions before and after every call of a method.

    The method of this one object is replaced, and put back on it.

    Args:
        owner: The object.
        name: Of its method.
        before: Called with the arguments of the call.
        after: Called with its result. Not called if it raised.

    Returns:
        Close it to stop that.
    """
    original = getattr(owner, name)
    replaced = vars(owner).get(name)

    @wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        result = original(*args, **kwargs)
        after(result)
        return result

    def put_back() -> None:
        if vars(owner).get(name) is not method:
            return  # somebody else has replaced it since
        if replaced is None:
            delattr(owner, name)
        else:
            setattr(owner, name, replaced)

    setattr(owner, name, method)
    undo = ExitStack()
    undo.callback(put_back)
    return undo
