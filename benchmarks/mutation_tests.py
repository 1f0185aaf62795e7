"""Tests of one mutant: those that run its line, fastest first, until one fails.

They run in forks of a process that has imported what tests need and nothing of traindiff, so that a mutant costs
little more than its tests. A fork imports the changed source in place of the file, which is left as it is.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from types import CodeType

import coverage
import pytest
from benchmarks.mutants import Mutant
from hypothesis import Phase, settings

IMPORTED_ONCE = ("torch._dynamo", "llvmlite.binding", "numpy", "pyarrow", "rich", "safetensors", "typer")

MEMORY = Path("/dev/shm")
"""Where there is such a folder, recordings are written there."""

SECONDS = 60
"""Of a processor: what the tests of a mutant may take beside five times what they take without it. A mutant whose tests
take longer does not end, and is noticed."""

NO_TESTS = int(pytest.ExitCode.NO_TESTS_COLLECTED)
QUIET = ("-qq", "-x", "--no-header", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What each test takes and runs.

    Attributes:
        seconds: Of a processor, by the test's id.
        tests: By file and line, the tests that run it; what is run by imports alone is not counted.
    """

    seconds: Mapping[str, float]
    tests: Mapping[str, Mapping[int, Sequence[str]]]

    def of(self, mutant: Mutant, most: int | None = None) -> list[str]:
        """Tests that may find a mutant, fastest first.

        Those that run its line; of what imports run, all in files of tests of which some run anything of its file.
        """
        lines = self.tests.get(str(mutant.path), {})
        if mutant.in_function:
            first, last = mutant.statement
            found = {test for line in range(first, last + 1) for test in lines.get(line, ())}
        else:
            files = {_file_of(test) for tests in lines.values() for test in tests}
            found = {test for test in self.seconds if not files or _file_of(test) in files}
        return sorted(found & set(self.seconds), key=lambda test: self.seconds[test])[:most]

    def without_longer(self, seconds: float) -> Measured:
        """The same without tests that take longer."""
        return replace(self, seconds={test: taken for test, taken in self.seconds.items() if taken <= seconds})


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def import_once() -> None:
    """Import what tests need beside traindiff, and spare forks from collecting its garbage."""
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def measure(tests: Sequence[str], source: Path) -> Measured:
    """Run all tests once, in a fork.

    Raises:
        SystemExit: Some fail as it is.
    """
    with TemporaryDirectory() as directory:
        file, output = Path(directory) / "measured.json", Path(directory) / "output"
        if waited(forked(lambda: _measure(tests, source, file), output)):
            print(output.read_text(errors="replace"), file=sys.stderr)
            raise SystemExit(f"{' '.join(tests)} do not pass as they are (above); nothing was measured.")
        seconds, lines = json.loads(file.read_text())
    return Measured(
        seconds=seconds,
        tests={path: {int(line): found for line, found in of_path.items()} for path, of_path in lines.items()},
    )


def check_order(measured: Measured, unchanged: Mutant, module: str) -> None:
    """Run all tests as those of a mutant are run, without one.

    Raises:
        SystemExit: Some fail, so that a failure would not tell that a mutant was noticed.
    """
    tests = sorted(measured.seconds, key=lambda test: measured.seconds[test])
    if waited(start(unchanged, tests, module, seconds=sum(measured.seconds.values()))):
        raise SystemExit("Tests fail without any change when the fastest run first; nothing was measured.")


def start(mutant: Mutant, tests: Sequence[str], module: str, *, seconds: float) -> int:
    """Begin to test a mutant in a fork; its id.

    Args:
        mutant: To be found.
        tests: Ids, in the order in which they are to run.
        module: Full name of the mutant's module.
        seconds: What they take without the mutant.
    """

    def run() -> int:
        limit = int(SECONDS + 5 * seconds)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        sys.meta_path.insert(0, _Finder(module, mutant))
        files = dict.fromkeys(map(_file_of, tests))
        return _pytest(list(files), _Chosen(tests))

    return forked(run)


def forked(run: Callable[[], int], output: Path = Path(os.devnull)) -> int:
    """Begin to run something in a fork, whose exit status it returns and whose output goes to a file; its id."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            with output.open("w") as written:
                os.dup2(written.fileno(), 1)
                os.dup2(written.fileno(), 2)
            status = run()
        finally:
            os._exit(status)
    return process


def waited(process: int) -> int:
    """Exit status of a fork."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _pytest(options: Sequence[str], plugin: object) -> int:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as directory:
        return int(pytest.main([*QUIET, f"--basetemp={directory}/tests", *options], plugins=[plugin]))


def _measure(tests: Sequence[str], source: Path, file: Path) -> int:
    measuring = coverage.Coverage(data_file=None, source=[str(source)], config_file=False)
    plugin = _Measuring(measuring)
    measuring.start()
    status = _pytest(tests, plugin)
    measuring.stop()
    data = measuring.get_data()
    lines = {
        path: {line: sorted(filter(None, found)) for line, found in data.contexts_by_lineno(path).items()}
        for path in data.measured_files()
    }
    file.write_text(json.dumps([plugin.seconds, lines]))
    return status


class _Measuring:
    """A pytest plugin that tells `coverage` which test runs, and notes how long each took."""

    def __init__(self, measuring: coverage.Coverage) -> None:
        self._measuring = measuring
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        self._measuring.switch_context(item.nodeid)
        began = process_time()
        found = yield
        self.seconds[item.nodeid] = process_time() - began
        self._measuring.switch_context("")
        return found


class _Chosen:
    """A pytest plugin that runs certain tests, in a certain order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self._places = {test: place for place, test in enumerate(tests)}

    def pytest_collection(self) -> None:
        # What fails is enough; the smallest example of it is not looked for.
        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("mutation", parent=settings.default, phases=phases, database=None)
        settings.load_profile("mutation")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self._places]
        items[:] = sorted(chosen, key=lambda item: self._places[item.nodeid])


class _Finder:
    """An import hook that gives one module another source."""

    def __init__(self, module: str, mutant: Mutant) -> None:
        self._module = module
        self._mutant = mutant

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != self._module:
            return None
        return spec_from_file_location(name, self._mutant.path, loader=_Loader(name, self._mutant))


class _Loader(SourceFileLoader):
    def __init__(self, module: str, mutant: Mutant) -> None:
        super().__init__(module, str(mutant.path))
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        return compile(self._mutant.source, self.path, "exec", dont_inherit=True)
