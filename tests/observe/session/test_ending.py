"""What a recording says of how its training ended."""

from __future__ import annotations

import os
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import traindiff
from tests.warm_process import warm
from traindiff.storage import open_recording
from traindiff.testing import assert_equivalent

BEGIN = """
import os, signal, sys
import torch, traindiff
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def backward():
    optimizer.zero_grad()
    model(torch.randn(3, 4)).square().mean().backward()
def train(steps):
    for _ in range(steps):
        backward()
        optimizer.step()
def fail():
    raise RuntimeError("boom")
"""


def source(path: Path, code: str) -> str:
    return BEGIN + textwrap.dedent(code).replace("PATH", repr(str(path)))


def ended(path: Path, code: str) -> Any:
    """Run code that records into `path`, catch whatever ends it, and check the recording."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        exec(source(path, code), {"__name__": "script"})
    except BaseException as error:  # noqa: BLE001  how it ends is the point
        assert isinstance(error, (RuntimeError, KeyboardInterrupt, SystemExit)), error  # noqa: PT017
    finally:
        signal.signal(signal.SIGTERM, before)
    return traindiff.check(path, rules="non-finite")


def script(path: Path, code: str, *, launcher: tuple[str, ...] = ()) -> Any:
    """Run code that records into `path` as a program, and check the recording."""
    file = path.parent / "script.py"
    file.write_text(source(path, code))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    warm(*launcher, file, env=environment)
    return traindiff.check(path, rules="non-finite")


WITH = """
    with traindiff.record(PATH, model, optimizer):
        train(3)
        backward()
        {}
"""
PLAIN = """
    run = traindiff.record(PATH, model, optimizer)
    train(3)
    backward()
    {}
"""
FINALLY = """
    run = traindiff.record(PATH, model, optimizer)
    try:
        train(3)
        backward()
        {}
    finally:
        run.close()
"""
ERROR = "rank 0: the training was ended by RuntimeError in step 3: boom."
ABORTED = {
    "an error through with": (WITH.format("fail()"), ERROR),
    "an error that ends the program": (PLAIN.format("fail()"), ERROR),
    "an error through finally": (FINALLY.format("fail()"), ERROR),
    "interrupted": (
        WITH.format("signal.raise_signal(signal.SIGINT)"),
        "rank 0: the training was ended by KeyboardInterrupt in step 3.",
    ),
    "exit with a code": (WITH.format("sys.exit(7)"), "rank 0: the training was ended by SystemExit in step 3: 7."),
    "exit within a step": (WITH.format("sys.exit()"), "rank 0: the training was ended by SystemExit in step 3."),
    "exit that nothing sees": (PLAIN.format("sys.exit(1)"), "rank 0: the program ended in the middle of step 3."),
    "a handler of SIGTERM that raises": (
        WITH.format("signal.signal(signal.SIGTERM, lambda *_: fail()); signal.raise_signal(signal.SIGTERM)"),
        ERROR,
    ),
}


@pytest.mark.parametrize("how", ABORTED)
def test_a_training_that_is_aborted_is_incomplete_and_says_why(how: str, tmp_path: Path) -> None:
    code, message = ABORTED[how]

    run = script if code.startswith(PLAIN[:40]) else ended
    verdict = run(tmp_path / "run", code)

    last = "Its last finished step is 2; its last observation is backward (root) output[0] in step 3."
    assert (verdict.verdict, verdict.exit_code, verdict.steps) == ("incomplete", 3, (0, 1, 2))
    assert verdict.notes[0] == f"{message} {last}"


KILLED = ("os._exit(0)", "os.kill(os.getpid(), signal.SIGTERM)")


@pytest.mark.parametrize("kill", KILLED)
def test_a_training_that_is_killed_is_incomplete(kill: str, tmp_path: Path) -> None:
    verdict = script(tmp_path / "run", WITH.format(kill))

    assert (verdict.verdict, verdict.exit_code) == ("incomplete", 3)
    assert verdict.notes[0] == (
        "rank 0: the recording was not closed (the run was killed, could not write, or still runs). "
        "Its last finished step is 2; its last observation is param bias value in step 2."
    )


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("train(3)\nbackward()\nfail()", "by RuntimeError in step 3: boom."),
        ("train(3)\nsys.exit('no')", "by SystemExit in step 3: no."),
    ],
)
def test_a_script_under_traindiff_run_that_is_aborted_is_incomplete(code: str, message: str, tmp_path: Path) -> None:
    launcher = ("-m", "traindiff", "run", "-o", str(tmp_path / "run"))

    verdict = script(tmp_path / "run", code, launcher=launcher)

    assert verdict.verdict == "incomplete"
    assert message in verdict.notes[0]


ORDINARY = {
    "returned": WITH.format("optimizer.step()"),
    "left out the last micro-batches": """
        with traindiff.record(PATH, model, optimizer):
            for number in range(11):
                model(torch.randn(3, 4)).square().mean().backward()
                if number % 3 == 2:
                    optimizer.step()
                    optimizer.zero_grad()
            sys.exit()
    """,
    "ends with a backward pass": WITH.format("pass"),
    "out of data": """
        def batches():
            with traindiff.record(PATH, model, optimizer):
                train(3)
                yield
        for _ in batches():
            break
    """,
    "StopIteration": """
        try:
            with traindiff.record(PATH, model, optimizer):
                train(3)
                next(iter(()))
        except StopIteration:
            pass
    """,
    "exit after a step": """
        run = traindiff.record(PATH, model, optimizer)
        train(3)
        sys.exit()
    """,
    "evaluates last": """
        with traindiff.record(PATH, model, optimizer):
            train(3)
            model(torch.randn(3, 4))
            sys.exit()
    """,
    "trained while an error is handled": """
        try:
            import no_such_module_anywhere
        except ImportError:
            run = traindiff.record(PATH, model, optimizer)
            train(3)
            run.close()
    """,
    "an error that is handled on the way": """
        run = traindiff.record(PATH, model, optimizer)
        for _ in range(3):
            try:
                fail()
            except RuntimeError:
                train(1)
        run.close()
    """,
}


@pytest.mark.parametrize("how", ORDINARY)
def test_ordinary_ends_leave_a_run_healthy(how: str, tmp_path: Path) -> None:
    run = script if how == "exit after a step" else ended
    verdict = run(tmp_path / "run", ORDINARY[how])

    assert (verdict.verdict, verdict.notes) == ("healthy", ()), str(verdict)


def recorded(path: Path, *, steps: int, backward: bool = True, **settings: Any) -> Path:
    """A training of so many steps, and a backward pass."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer, **settings):
        for step in range(steps + backward):
            model(torch.randn(3, 4)).square().mean().backward()
            if step < steps:
                optimizer.step()
                optimizer.zero_grad()
    return path


@pytest.mark.parametrize("observe", [None, ["forward"], ["forward", "backward", "grad"], ["batch", "loss"]])
def test_runs_whose_optimizer_never_stepped_are_not_known_to_be_equal(observe: Any, tmp_path: Path) -> None:
    settings = {} if observe is None else {"observe": observe}
    paths = [recorded(tmp_path / name, steps=0, **settings) for name in ("baseline", "candidate")]

    comparison = traindiff.compare(*paths)

    assert (comparison.verdict, comparison.exit_code) == ("incomplete", 3)
    assert any("No optimizer has stepped" in note for note in comparison.notes)
    assert traindiff.check(paths[0]).verdict == "incomplete"
    with pytest.raises(AssertionError, match="No optimizer has stepped"):
        assert_equivalent(*paths)


def test_steps_that_are_not_finished_make_whole_runs_no_less_equal(tmp_path: Path) -> None:
    paths = [recorded(tmp_path / name, steps=2) for name in ("baseline", "candidate")]

    assert traindiff.compare(*paths).verdict == "identical"
    assert traindiff.check(paths[0]).verdict == "healthy"


def test_the_number_of_steps_is_known_where_only_outputs_are_recorded(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", steps=2, observe=["forward"])

    assert traindiff.check(path).steps == (0, 1)
    assert open_recording(str(path)).rank_content(0)["ended"] == {"steps": {"optimizer": 2}, "error": None}


def test_a_fork_that_exits_says_nothing_of_the_end(tmp_path: Path) -> None:
    code = """
        run = traindiff.record(PATH, model, optimizer)
        train(2)
        backward()
        if os.fork() == 0:
            sys.exit(1)
        os.wait()
        os._exit(0)
    """
    script(tmp_path / "run", code)

    assert "ended" not in open_recording(str(tmp_path / "run")).rank_content(0)


TWO = """
other = torch.nn.Linear(2, 1)
second = torch.optim.SGD(other.parameters(), lr=0.1)
recorder = traindiff.record(PATH, {"first": model, "second": other}, [optimizer, second])
for step in range(3):
    backward()
    optimizer.step()
    second.zero_grad()
    other(model(torch.randn(3, 4)).detach()).mean().backward()
    if step < 2 or LAST:
        second.step()
"""


@pytest.mark.parametrize(("last", "word"), [(True, "healthy"), (False, "incomplete")])
def test_a_program_may_end_with_the_step_of_any_optimizer(last: bool, word: str, tmp_path: Path) -> None:
    assert script(tmp_path / "run", TWO.replace("LAST", repr(last))).verdict == word
