"""Run a script as `python` does, in this process."""

from __future__ import annotations

import builtins
import importlib.util
import io
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from traindiff.errors import ConfigError, Problem

_MAIN = "__main__"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A script that is ready to run.

    Attributes:
        spec: Location of its code.
        main: The module in which it runs.
    """

    spec: ModuleSpec
    main: ModuleType

    def run(self) -> None:
        """Run it to its end. Its exceptions are raised here, and printed as usual if they end the process."""
        exec(_code(self.spec), vars(self.main))


_LAUNCHERS = {
    "torchrun": "torchrun ... -m",
    "torch.distributed.run": "python -m torch.distributed.run ... -m",
    "torch.distributed.launch": "python -m torch.distributed.launch ... -m",
    "accelerate": "accelerate launch ... -m",
    "deepspeed": "deepspeed ... --module",
    "mpirun": "mpirun ... python -m",
    "mpiexec": "mpiexec ... python -m",
    "srun": "srun ... python -m",
}
"""Programs and modules that start the ranks of a training, each with how it is told to start a module."""

_PYTHON = re.compile(r"python(3(\.\d+)?)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The arguments that `python` would get: a path or the name of a module, and the script's own arguments."""

    name: str
    is_module: bool = False
    arguments: Sequence[str] = ()

    def check(self) -> None:
        """Check that the script exists.

        Raises:
            ConfigError: It does not, or it is a program that starts scripts.
        """
        launching = _LAUNCHERS.get(self.name if self.is_module else Path(self.name).name)
        if launching is not None and (self.is_module or _is_program(self.name)):
            what = "starts the processes of a training, and each of them has to be recorded."
            raise _unusable(self.name, what, f"Put it first: {launching} traindiff run -o DIR SCRIPT.")
        if not self.is_module and _PYTHON.fullmatch(self.name) and _is_program(self.name):
            raise _unusable(self.name, "is no script.", "Leave it out: traindiff run -o DIR SCRIPT.")
        if not self.is_module and not Path(self.name).is_file():
            found = "is a directory" if Path(self.name).is_dir() else "does not exist"
            raise _unusable(self.name, f"{found}.", "Give the path of a Python file, or -m and the name of a module.")

    def prepared(self) -> Prepared:
        """Make the script `__main__` until this process ends, with its arguments and its directory on `sys.path`.

        Raises:
            ConfigError: The module does not exist.
        """
        main = ModuleType(_MAIN)
        if self.is_module:
            _first_on_path(Path.cwd())
            spec = self._spec()
            sys.argv = [str(spec.origin), *self.arguments]
            about = {"__spec__": spec, "__package__": spec.parent, "__file__": spec.origin, "__cached__": spec.cached}
        else:
            path = Path(self.name).absolute()
            _first_on_path(path.resolve().parent)
            sys.argv = [self.name, *self.arguments]
            spec = ModuleSpec(_MAIN, SourceFileLoader(_MAIN, str(path)), origin=str(path))
            about = {"__spec__": None, "__package__": None, "__file__": str(path), "__cached__": None}
        vars(main).update(about, __loader__=spec.loader, __builtins__=builtins, __annotations__={})
        sys.modules[_MAIN] = main
        sys.excepthook = partial(_print_error, sys.excepthook, vars(main))
        return Prepared(spec=spec, main=main)

    def _spec(self) -> ModuleSpec:
        """The spec of the module, or of a package's `__main__`."""
        fix = "Give the name of a module as it is imported, as in traindiff run -o DIR -m package.train."
        try:
            spec = importlib.util.find_spec(self.name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.name}.{_MAIN}")
        except ModuleNotFoundError as error:
            raise _unusable(f"-m {self.name}", f"cannot be found: {error}.", fix) from None
        if spec is None or spec.origin is None:
            raise _unusable(f"-m {self.name}", "is no module, and no package with a __main__.", fix)
        return spec


def _is_program(name: str) -> bool:
    """True for the name or the path of a program that the shell finds, and for a name that is no file."""
    path, found = Path(name), shutil.which(Path(name).name)
    return not path.is_file() or (found is not None and path.resolve() == Path(found).resolve())


def is_script_itself(argument: str) -> bool:
    """True if an argument of a command names the running script: its path, or the name of its module."""
    main = sys.modules[_MAIN]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return argument in (spec.name, spec.name.removesuffix(f".{_MAIN}"))
    return path is not None and bool(argument) and Path(argument).resolve() == Path(path).resolve()


def _first_on_path(directory: Path) -> None:
    """Put a directory where `python` puts that of a script, unless `python` was told not to."""
    if not sys.flags.safe_path:
        sys.path[0:1] = [str(directory)]


def _code(spec: ModuleSpec) -> Any:
    """The compiled code of a script, or of a module."""
    if spec.name != _MAIN:
        return spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # loaders of source have it
    with io.open_code(str(spec.origin)) as file:
        return compile(file.read(), str(spec.origin), "exec", dont_inherit=True)


def _print_error(
    otherwise: Any,
    main: dict[str, Any],
    kind: type[BaseException],
    error: BaseException,
    where: TracebackType | None,
) -> None:
    """Print the script's exception as `python` does: without the frames of its callers."""
    while where is not None and where.tb_frame.f_globals is not main:
        where = where.tb_next
    otherwise(kind, error.with_traceback(where), where)


def _unusable(where: str, what: str, fix: str) -> ConfigError:
    return ConfigError("run", [Problem(where=where, what=what, fix=fix)], consequence="nothing was run")
