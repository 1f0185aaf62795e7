"""Do something when a module has been imported, and not before: importing it early may change what it does.

Torch reads the number of its threads from the environment when it is imported; a script may set it just before that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` as soon as the module has been imported; now, if it has."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(MetaPathFinder):
    """Has the module found as ever, and notices when it has been executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._is_looking = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  as it is called
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """See the base class."""
        if fullname != self._name or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_looking = False
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module  # an attribute of this loader alone, which hid the method of its class
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            loader.exec_module = exec_module
        return spec
