"""A script under `traindiff run` meets what it would meet under `python`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.run.script.running_scripts import plain, recorded, recorded_warm
from traindiff.storage.location import of_this_start

ABOUT = """
import sys
print(__name__, __file__, __spec__, __package__, __doc__, type(__loader__).__name__, type(__builtins__).__name__)
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
"""

ENDS = {
    "returns": "print(1)",
    "exits with a number": "import sys; sys.exit(7)",
    "exits with a message": "raise SystemExit('no data')",
    "raises": "def train():\n    raise ValueError('broken')\ntry:\n    {}['a']\nexcept KeyError:\n    train()",
    "raises inside a module": "import json\njson.loads('{')",
    "is not Python": "def f(:",
    "meets the end of its input": "input()",
    "is interrupted": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)",
    "prints its own errors": "import sys\nsys.excepthook = lambda *a: print('mine', a[1])\nraise ValueError('x')",
    "goes on in a thread": (
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(0.5), print('end'))).start()\n1 / 0"
    ),
}

PATCHES = """
import torch
calls, original = [], torch.nn.Module.__call__

def call(self, *args):
    calls.append(type(self).__name__)
    return original(self, *args)

torch.nn.Module.__call__ = call
model = torch.nn.Sequential(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
print(calls)
"""


HOOK = """
import importlib.util, sys

class Finder:
    looks = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.looks:
            return None
        self.looks = True
        spec = importlib.util.find_spec(name)
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module):
            {undo}
            execute(module)
            print("torch was imported")

        loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""
"""Has a function called when torch has been imported, as tools for tracing do."""

TRAINS = """
import torch
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(3, 2)).sum().backward()
optimizer.step()
"""


def both(tmp_path: Path, source: str, *arguments: str) -> None:
    """Hold what a script prints, and how it ends, against the same script by itself."""
    script = tmp_path / "script.py"
    script.write_text(source)
    expected = plain("script.py", *arguments, cwd=tmp_path)
    found = recorded("script.py", *arguments, output="run", cwd=tmp_path)

    assert (found.output, found.errors, found.code) == (expected.output, expected.errors, expected.code)


@pytest.mark.parametrize("source", ENDS.values(), ids=ENDS.keys())
def test_a_script_ends_as_it_would(tmp_path: Path, source: str) -> None:
    both(tmp_path, f"import atexit\natexit.register(print, 'at exit')\n{source}" if "f(:" not in source else source)


def test_an_interrupted_script_is_ended_by_the_signal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS["is interrupted"])

    assert recorded("script.py", output="run", cwd=tmp_path).code == -signal.SIGINT


def test_a_script_has_its_own_name_arguments_and_path(tmp_path: Path) -> None:
    both(tmp_path, ABOUT, "--lr", "3", "-o", "elsewhere", "--help", "--")


def test_a_script_imports_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "beside.py").write_text("here = __file__")
    (tmp_path / "deep" / "script.py").write_text("import beside; print(beside.here)")

    found = recorded("deep/script.py", output="run", cwd=tmp_path)
    assert found.output == plain("deep/script.py", cwd=tmp_path).output


def test_a_module_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(ABOUT.replace("__spec__", "__spec__.name"))
    (tmp_path / "package" / "__main__.py").write_text("from package import train; import sys; sys.exit(3)")

    for name in ("package.train", "package"):
        expected = plain("-m", name, "-x", cwd=tmp_path)
        found = recorded("-m", name, "-x", output="run", cwd=tmp_path)
        assert (found.output, found.errors, found.code) == (expected.output, expected.errors, expected.code)


def test_processes_find_what_the_script_defines(tmp_path: Path) -> None:
    source = """
import multiprocessing, pickle

class Item:
    pass

def work(item, queue):
    queue.put(type(item).__name__)

if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Item())).__class__.__module__)
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=work, args=(Item(), queue))
        process.start()
        print(queue.get(timeout=60))
        process.join()
"""
    both(tmp_path, source)


def test_torch_is_imported_by_the_script_and_not_before(tmp_path: Path) -> None:
    source = """
import os, sys
print("torch" in sys.modules)
os.environ["OMP_NUM_THREADS"] = "3"
import torch
print(torch.get_num_threads())
"""
    both(tmp_path, source)


@pytest.mark.parametrize("undo", ["pass", "del loader.exec_module"])
def test_an_import_hook_of_another_tool_works_and_the_script_is_recorded(undo: str, tmp_path: Path) -> None:
    both(tmp_path, HOOK.format(undo=undo) + TRAINS)

    assert (tmp_path / "run" / "run.json").exists()


def test_the_recording_lies_where_it_was_asked_for_whatever_directory_the_script_changes_to(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "script.py").write_text(
        "import os, torch\nos.chdir('inner')\nmodel = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "model(torch.ones(3, 2)).sum().backward()\noptimizer.step()"
    )

    assert recorded_warm("script.py", output="run", cwd=tmp_path).said[0] == "Recorded in run: 1 step of SGD."
    assert (tmp_path / "run" / "run.json").exists()
    assert not list((tmp_path / "inner").iterdir())


def test_what_a_script_puts_in_the_place_of_torchs_own_functions_stays_there(tmp_path: Path) -> None:
    both(tmp_path, PATCHES)


def test_ranks_that_torchrun_starts_again_record_beside_what_they_had(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_this_start("runs/base") == "runs/base"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert of_this_start("runs/base/") == "runs/base-restart-2"
    assert of_this_start("runs/base-restart-2") == "runs/base-restart-2"
