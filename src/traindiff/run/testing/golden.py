"""Golden recordings: kept results of a training that was known to be right."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traindiff.analyse.compare import Comparison, compare
from traindiff.errors import ConfigError, Problem
from traindiff.run.testing.equivalence import require
from traindiff.storage import open_recording
from traindiff.storage.location import file_name

if TYPE_CHECKING:
    from torch import nn

    from traindiff.observe.torch.session.recorder import Recorder
    from traindiff.observe.torch.session.targets import Optimizers
    from traindiff.run.verify.recipe import Recipe

UPDATE = "--traindiff-update"
"""The pytest option that keeps the current results of trainings."""

_MEANT = f"\nIf the change is meant, keep what the training computes now: pytest {UPDATE}"
_BASELINE = "baseline"


@dataclass(slots=True, kw_only=True)
class Golden:
    """The golden recordings of one test; the fixture `traindiff_golden` of the pytest plugin.

    ```python
    def test_training_has_not_changed(traindiff_golden):
        model, optimizer = ...
        with traindiff_golden.record(model, optimizer):
            train(model, optimizer)
    ```

    Attributes:
        directory: Holds the golden recordings, one directory per name.
        scratch: Holds the recordings of this run of the test.
        reports: Directory for the HTML report of a training that differs; by default below `scratch`.
        update: Keep the current results instead of comparing.
        written: Directories that were written or replaced.
        kept: Directories that an update left alone, because the bits are the same.
    """

    directory: Path
    scratch: Path
    reports: Path | None = None
    update: bool = False
    written: list[Path] = field(default_factory=list)
    kept: list[Path] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    @contextmanager
    def record(
        self,
        model: nn.Module,
        optimizer: Optimizers = None,
        *,
        name: str = "training",
        rtol: float | None = None,
        atol: float | None = None,
        identical: bool = False,
        **settings: Any,
    ) -> Iterator[Recorder]:
        """Record a training, and at the end compare it with the golden one, unless the training raises.

        Args:
            model: See `traindiff.record`.
            optimizer: See `traindiff.record`.
            name: Name of the training, if a test has several.
            rtol: Relative tolerance in place of noise floors; see `traindiff.compare`.
            atol: Absolute tolerance per element, in the same formula.
            identical: Demand the same bits.
            settings: Settings of `traindiff.record`.

        Yields:
            The running recording.

        Raises:
            AssertionError: It diverges from the golden one, or there is none.
            ConfigError: A setting is wrong.
        """
        __tracebackhide__ = True
        from traindiff.observe.torch.session.record import record

        path = self._candidate(name)
        with record(path, model, optimizer, **settings) as run:
            yield run
        self.check(path, name=name, rtol=rtol, atol=atol, identical=identical)

    def recipe(
        self,
        recipe: Recipe,
        *,
        name: str = "recipe",
        steps: int = 4,
        seed: int = 0,
        replicas: Sequence[str] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        identical: bool = False,
        rename: Mapping[str, str] | Sequence[str] | None = None,
    ) -> Comparison | None:
        """Run a recipe and compare it with the golden run, against noise floors that were measured with that run.

        Args:
            recipe: Prepares the training.
            name: Name of the training, if a test has several.
            steps: Batches to train on.
            seed: Seed of torch's, NumPy's and Python's generators.
            replicas: Perturbations that measure the golden training's noise; see `traindiff.calibrate`.
            rtol: Relative tolerance in place of noise floors; see `traindiff.compare`.
            atol: Absolute tolerance per element, in the same formula.
            identical: Demand the same bits.
            rename: See `traindiff.compare`.

        Returns:
            The comparison; None if the golden recording was made.

        Raises:
            AssertionError: It diverges from the golden one, or there is none.
            ConfigError: The recipe cannot be used, or a setting is wrong.
        """
        __tracebackhide__ = True
        from traindiff.run.verify.run_recipe import run_recipe
        from traindiff.run.verify.runs import REPLICAS
        from traindiff.run.verify.verify import calibrate

        path = self._candidate(name)
        run_recipe(recipe, path, num_steps=steps, seed=seed, asked_by=f"golden recipe {name!r}")

        def measured(directory: Path) -> None:
            calibrate(recipe, directory, steps=steps, seed=seed, replicas=REPLICAS if replicas is None else replicas)

        return self._checked(path, name, measured, rename=rename, rtol=rtol, atol=atol, identical=identical)

    def check(
        self,
        recording: str | os.PathLike[str],
        *,
        name: str = "training",
        rename: Mapping[str, str] | Sequence[str] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
        identical: bool = False,
    ) -> Comparison | None:
        """Compare a recording with the golden one, e.g. one that several ranks have written.

        The settings are those of `recipe`.

        Returns:
            The comparison; None if the recording has become the golden one.

        Raises:
            AssertionError: It diverges from the golden one, or there is none.
            ConfigError: A setting is wrong.
            RecordingError: A recording cannot be used.
        """
        __tracebackhide__ = True

        def copied(directory: Path) -> None:
            shutil.copytree(recording, directory / _BASELINE)

        return self._checked(
            Path(recording), name, copied, rename=rename, rtol=rtol, atol=atol, identical=identical
        )  # fmt: skip

    def _checked(
        self, recording: Path, name: str, make: Callable[[Path], object], **settings: Any
    ) -> Comparison | None:
        """Compare with the golden recording; with `update`, let `make` write a new one unless the bits are equal."""
        __tracebackhide__ = True
        if name in self._names:
            problem = Problem(
                where=f"name={name!r}", what="is used twice in this test.", fix="Give each training a name of its own."
            )
            raise ConfigError("traindiff_golden", [problem])
        self._names.add(name)
        kept = self.directory / file_name(name)
        if not (kept / _BASELINE).exists():
            if self.update:
                self._replace(kept, make)
                return None
            raise AssertionError(f"{kept} holds no golden recording of this training. Make it: pytest {UPDATE}")
        noise = sorted(path for path in kept.iterdir() if path.name != _BASELINE and (path / "run.json").exists())
        comparison = compare(kept / _BASELINE, recording, noise=noise, **settings)
        if not self.update:
            report = (self.reports or self.scratch / "reports") / f"{kept.parent.name}-{kept.name}.html"
            require(comparison, report=report, hint=_MEANT, **settings)
        elif comparison.verdict == "identical":
            self.kept.append(kept)
        else:
            self._replace(kept, make)
        return comparison

    def _candidate(self, name: str) -> Path:
        """Path for the recording of a training of this test run."""
        return self.scratch / file_name(name) / f"candidate-{len(self._names)}"

    def _replace(self, kept: Path, make: Callable[[Path], object]) -> None:
        """Write a directory, and put it in the place of the golden one when it is complete."""
        fresh = self.scratch / "golden" / kept.name
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.parent.mkdir(parents=True, exist_ok=True)
        make(fresh)
        open_recording(os.fspath(fresh / _BASELINE))
        kept.parent.mkdir(parents=True, exist_ok=True)
        if kept.exists():
            shutil.rmtree(kept)
        shutil.move(fresh, kept)
        self.written.append(kept)
