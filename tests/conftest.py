"""Settings that all tests share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.made_up import Compared, Edit, Measured
    from traindiff.analyse.compare import Comparison

try:
    from hypothesis import settings
except ModuleNotFoundError:  # tests/no_torch need nothing but pytest
    pass
else:
    # The same examples on every run, so that a red build is red again on the next machine.
    settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
    # HYPOTHESIS_PROFILE=explore looks for new ones.
    settings.register_profile("explore", deadline=None, max_examples=2000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


# A shell starts what runs in the background with SIGINT ignored, and so would be what tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Prepare this process for many tests.

    Python's garbage collector leaves out what is alive by now: thousands of tests and all that they have imported. A
    recorder looks for optimizers and models among the objects that the collector knows.

    Ranks are forked from a process that has imported and built what they need; see `tests.warm`. Only where a
    collected test may run ranks. The server that `launch` would start is then there already.
    """
    gc.collect()
    gc.freeze()
    if "traindiff.run.processes.launch" in sys.modules or "tests.run.verify.recipes" in sys.modules:
        from multiprocessing import forkserver

        forkserver.set_forkserver_preload(["tests.warm"])
        forkserver.ensure_running()


@pytest.fixture(scope="module", params=["reference", "compiled"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have `traindiff.core.kernels.summarize` use the NumPy reference, or the compiled kernel for the CPU."""
    from traindiff.core import kernels

    with pytest.MonkeyPatch.context() as patched:
        if request.param == "reference":
            patched.setattr(kernels, "AT_ONCE", ())
        elif not any(kernel.load() for kernel in kernels.AT_ONCE):
            pytest.skip("llvmlite is not installed")
        yield request.param


@pytest.fixture
def compared(tmp_path: Path) -> Compared:
    """Compare the made-up run with an edited one; `baseline_edit` edits the other one too."""
    from tests.made_up import record
    from traindiff.analyse.compare import compare

    def run(edit: Edit = lambda step, sites: None, *, baseline_edit: Edit | None = None, **options: Any) -> Comparison:
        settings = {
            name: options.pop(name) for name in ("steps", "content", "close", "run", "recorded") if name in options
        }
        number = len(list(tmp_path.iterdir()))
        baseline = record(tmp_path / f"baseline-{number}", baseline_edit or (lambda step, sites: None))
        candidate = record(tmp_path / f"candidate-{number}", edit, **settings)
        return compare(baseline, candidate, **options)

    return run


@pytest.fixture
def measured(tmp_path: Path) -> Measured:
    """Compare the plain run with an edited one, floors measured from replicas that are edited in turn."""
    from tests.made_up import plain_step, record
    from traindiff.analyse.compare import compare

    def run(
        candidate: Edit, *noise: Edit, replica: str | None = "ulp", build: Any = plain_step, **options: Any
    ) -> Comparison:
        where = tmp_path / str(len(list(tmp_path.iterdir())))
        baseline = record(where / "baseline", build=build)
        found = record(where / "candidate", candidate, build=build)
        paths = []
        for number, edit in enumerate(noise, start=1):
            settings = {"replica": f"{replica}:{number}" if replica else None}
            paths.append(record(where / f"noise-{number}", edit, build=build, recorded=settings, **options))
        return compare(baseline, found, noise=paths)

    return run


@pytest.fixture(autouse=True, scope="session")
def rules_that_find_something_apply() -> Iterator[None]:
    """In all tests: a rule that finds something in a check has not said before that the run has nothing for it."""
    from traindiff.analyse.rules.run_judge import RunJudge

    answer = RunJudge._answer

    def checked(judge: Any, rule: Any, counting: Any, left_out: Any) -> Any:
        found = answer(judge, rule, counting, left_out)
        kinds = {finding.kind for finding in counting}
        own = [one.kinds for one in judge._rules if one is not rule]
        if found.result in ("broken", "warned") and kinds & set(rule.kinds) - {kind for other in own for kind in other}:
            assert not judge._nothing_to_judge(rule), f"{rule.name} finds something, and applies nowhere"
        return found

    RunJudge._answer = checked  # type: ignore[method-assign]
    yield
    RunJudge._answer = answer  # type: ignore[method-assign]
