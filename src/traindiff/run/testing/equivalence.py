"""`assert_equivalent`: two trainings compute the same, or the test names their first divergence."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traindiff.analyse.compare import Comparison, Verification, compare
from traindiff.analyse.findings import where_text
from traindiff.errors import ConfigError, Problem, TraindiffError, type_of

if TYPE_CHECKING:
    from traindiff.observe.torch.session.recorder import Recorder
    from traindiff.run.verify.recipe import Recipe

    Side = str | os.PathLike[str] | Recorder | Recipe

_ASKED_BY = "assert_equivalent(...)"
_RUN = {"seed", "replicas", "repeat"}
_KINDS = "Give two recordings (paths, or what traindiff.record returned), or two recipes (functions)."


def assert_equivalent(
    baseline: Side,
    candidate: Side,
    *,
    noise: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = (),
    rename: Mapping[str, str] | Sequence[str] | None = None,
    map: str | os.PathLike[str] | None = None,  # noqa: A002  as in the commands
    accept: str | os.PathLike[str] | None = None,
    ignore: str | Sequence[str] = (),
    steps: str | int | Iterable[int] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    identical: bool = False,
    output: str | os.PathLike[str] | None = None,
    **running: Any,
) -> Comparison | Verification:
    """Raise unless two trainings compute the same thing; the message names the first divergence.

    ```python
    def test_the_fused_kernel_trains_like_the_plain_one():
        traindiff.testing.assert_equivalent(plain, fused, steps=4)
    ```

    Recordings are compared as by `traindiff.compare`. Recipes are run, measured and pinned down as by
    `traindiff.verify`. A verdict of `incomplete` or `misaligned` fails too: nothing shows that the rest is equal.

    Args:
        baseline: The trusted training: a recording (its path, or the result of `traindiff.record`), or a recipe.
        candidate: The training in question, given in the same way.
        noise: For two recordings: further recordings that measure noise floors; see `traindiff.compare`.
        rename: Turns the candidate's paths into the baseline's; see `traindiff.compare`.
        map: Which tensors and modules of the two are which; see `traindiff.compare`.
        accept: Intended differences; see `traindiff.compare`.
        ignore: Sites whose differences are no findings; see `traindiff.compare`.
        steps: For two recordings: steps to compare, e.g. `"0-9"`; by default all. For two recipes: the number of
            batches to train on, by default 4.
        rtol: Relative tolerance in place of noise floors; see `traindiff.compare`.
        atol: Absolute tolerance per element, in the same formula.
        identical: Demand the same bits. The message then names the first site in execution order whose bits differ.
        output: For two recipes: directory for the recordings. By default a temporary one, kept if the two differ.
        running: For two recipes: `seed`, `replicas` and `repeat`; see `traindiff.verify`.

    Returns:
        A `Comparison` of recordings, a `Verification` of recipes.

    Raises:
        AssertionError: They diverge, or not all of them could be compared. Its text is the report.
        ConfigError: A setting is wrong, or a recording and a recipe were given.
        RecordingError: A recording cannot be used.
    """
    __tracebackhide__ = True
    paths = (_path(baseline), _path(candidate))
    result: Comparison | Verification
    if paths[0] is not None and paths[1] is not None:
        _refuse({**running, **({"output": output} if output is not None else {})}, of="recordings")
        result = compare(
            paths[0], paths[1], noise=noise, rename=rename, map=map, accept=accept, ignore=ignore, steps=steps,
            rtol=rtol, atol=atol, identical=identical,
        )  # fmt: skip
        require(result)
        return result
    if paths != (None, None) or not callable(baseline) or not callable(candidate):
        raise ConfigError(_ASKED_BY, [_kinds(baseline, candidate)])
    _refuse({**running, **({"noise": noise} if noise else {})}, of="recipes", known=_RUN)
    num_steps = 4 if steps is None else steps
    if not isinstance(num_steps, int):
        problem = Problem(
            where=f"steps={steps!r}", what="of two recipes is how many batches to train on.", fix="Write steps=4."
        )
        raise ConfigError(_ASKED_BY, [problem])
    settings = {
        "rename": rename,
        "map": map,
        "accept": accept,
        "ignore": ignore,
        "rtol": rtol,
        "atol": atol,
        "identical": identical,
        "steps": num_steps,
        **running,
    }
    return _verified(baseline, candidate, output, settings)


def require(result: Comparison | Verification, *, report: Path | None = None, hint: str = "", **settings: Any) -> None:
    """Raise `AssertionError` unless the verdict is `equivalent` or `identical`.

    The message begins with the first finding in a line, as pytest's summary shows it.

    Args:
        result: The result that is judged.
        report: File to write an HTML report to, if the verdict is another one; None for none.
        hint: A line that ends the message.
        settings: The settings of `compare` with which the result was made, for the report.
    """
    __tracebackhide__ = True
    comparison = result.comparison if isinstance(result, Verification) else result
    if result.verdict in ("identical", "equivalent"):
        return
    first = result.first_divergence
    headline = f"{result.verdict}: {where_text(first)}: {first.said}" if first else f"{result.verdict}."
    paths = (f"baseline:  {comparison.baseline}", f"candidate: {comparison.candidate}")
    made = _written_report(comparison, report, settings) if report is not None else ""
    words = shlex.join(("traindiff", "report", comparison.baseline, comparison.candidate, "-o", "report.html"))
    lines = (*paths, f"report:    {made or words}")
    raise AssertionError("\n".join([headline, "", str(result), "", *lines]) + hint)


def _written_report(comparison: Comparison, file: Path, settings: Mapping[str, Any]) -> str:
    """The path of the report that was written; empty if it could not be."""
    from traindiff.present.page import page_of, write

    noise = comparison.noise or {}
    measured = [one["path"] for one in noise.get("recordings", ())] + list(noise.get("identical", ()))
    try:
        found = compare(comparison.baseline, comparison.candidate, noise=measured, history=True, **settings)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("w", encoding="utf-8", errors="replace") as opened:
            write(page_of(found), opened)
    except (TraindiffError, OSError):  # the test fails with what it found, whatever becomes of the report
        return ""
    return str(file)


def _verified(
    baseline: Callable[[], Any],
    candidate: Callable[[], Any],
    output: str | os.PathLike[str] | None,
    settings: Mapping[str, Any],
) -> Verification:
    __tracebackhide__ = True
    from traindiff.run.verify.verify import verify

    directory = tempfile.mkdtemp(prefix="traindiff-") if output is None else os.fspath(output)
    keep = output is not None
    try:
        result = verify(baseline, candidate, directory, **settings)
        keep = keep or result.verdict not in ("identical", "equivalent")
    finally:
        if not keep:
            shutil.rmtree(directory, ignore_errors=True)
    judged = {name: settings[name] for name in ("rename", "map", "accept", "ignore", "rtol", "atol", "identical")}
    require(result, report=Path(directory) / "report.html", **judged)
    return result


def _path(side: Any) -> str | None:
    """The path of a recording; None for anything else."""
    if isinstance(side, (str, os.PathLike)):
        return os.fspath(side)
    path = getattr(side, "path", None)
    return path if isinstance(path, str) and not isinstance(side, type) else None


def _refuse(given: Mapping[str, Any], *, of: str, known: Iterable[str] = ()) -> None:
    problems = [
        Problem(where=name, what=f"is not a setting for two {of}.", fix="Leave it out, or see help(assert_equivalent).")
        for name in given
        if name not in known
    ]
    if problems:
        raise ConfigError(_ASKED_BY, problems, consequence="nothing was compared")


def _kinds(baseline: Any, candidate: Any) -> Problem:
    names = [f"a recording ({path})" if (path := _path(one)) else type_of(one) for one in (baseline, candidate)]
    return Problem(where="baseline, candidate", what=f"are {names[0]} and {names[1]}.", fix=_KINDS)
