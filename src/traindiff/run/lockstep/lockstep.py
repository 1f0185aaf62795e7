"""`traindiff.Lockstep`: two engines trained on the same batches, and compared while they train."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import IO, Any, Self

from torch import Tensor, nn

from traindiff.analyse.compare.verdict import Comparison
from traindiff.errors import ConfigError, LockstepError, Problem, type_of
from traindiff.run.config.training import Training
from traindiff.run.lockstep.live_comparison import Exchange, LiveComparison
from traindiff.run.lockstep.live_side import BatchGuard, LiveSide, noted, train_all
from traindiff.run.lockstep.printer import Printer
from traindiff.run.lockstep.ranks import LOOK_SECONDS, Ranks
from traindiff.run.lockstep.set_back import set_back
from traindiff.run.lockstep.settings import Paths, lockstep_settings
from traindiff.run.lockstep.stepped import REPLICAS, copied, refuse_one_for_both, stepped, uncopyable

_NO_MORE = object()


class Lockstep:
    """Two engines trained on the same batches in one process per rank, and compared while they train.

    ```python
    stepper = traindiff.Lockstep((model, optimizer), engine, batches, loss=loss_of)
    comparison = stepper.go()
    assert stepper.passed, comparison
    ```

    Each side is one of these:

    - `(model, optimizer)`, whose step is made from the loss;
    - `(model, optimizer, step)`, where `step(batch)` does everything from the forward pass to `zero_grad`;
    - a DeepSpeed engine, which scales, accumulates, clips and steps itself;
    - a `traindiff.Training`.

    Models may be wrapped or divided among ranks, differently on each side. Both train as they would alone, to the bit.
    Nothing is gathered: each rank summarizes its own part. See `traindiff explain lockstep`.

    Args:
        baseline: The trusted side.
        candidate: The side in question.
        data: The batches of this rank, the same for both sides. Optional if the baseline is a `Training`, or if you
            call `step` instead of `go`.
        loss: `loss(model, batch)`, the loss that is minimized. By default the model computes it.
        num_batches: Stop after this many batches. Default: all.
        test_every: Compare every N optimizer steps, starting with the first. The last step is compared too, if
            `num_batches` or the length of `data` tells which one it is.
        status_every: Print the losses of every N-th batch, and of the last.
        track_params: Compare parameters.
        param_tol: Largest relative L2 difference of a parameter that passes. By default noise floors decide. Without
            `track_params` it has no effect. The other three tolerances work the same way.
        track_loss: Compare losses.
        loss_tol: See `param_tol`.
        track_grads: Compare gradients, as the optimizers see them and in the stages before.
        grad_tol: See `param_tol`.
        track_activations: Compare outputs of modules, and their gradients.
        activation_tol: See `param_tol`.
        resync: Continue after a divergence, with the candidate reset to the baseline's state.
        noise: Recordings of further correct runs of the baseline's training, e.g. those of `traindiff.calibrate`. By
            default a baseline given as `(model, optimizer)` is copied twice, and the copies are perturbed within
            rounding and trained along, unless nothing is judged by noise floors.
        rename: Regular expressions and replacements that turn the candidate's paths into the baseline's.
        map: File that says which tensors and modules are which, or the name of a map; see `traindiff.compare`.
        accept: File of intended differences; see `traindiff.compare`.
        select: Globs over canonical paths that are observed.
        record: Further settings of `traindiff.record` for both sides, e.g. `{"batch_axis": 1}`.
        output: Directory in which to keep both recordings.
        file: File for the printed lines; by default standard output.
        timeout_seconds: How long a rank waits for the others.

    Attributes:
        comparison: The result; None until all batches are done.

    Raises:
        ConfigError: A setting, or a side, cannot be used. Nothing was trained.
    """

    def __init__(
        self,
        baseline: Any,
        candidate: Any,
        data: Iterable[Any] | None = None,
        *,
        loss: Callable[[nn.Module, Any], Tensor] | None = None,
        num_batches: int | None = None,
        test_every: int = 1,
        status_every: int = 5,
        track_params: bool = True,
        param_tol: float | None = None,
        track_loss: bool = True,
        loss_tol: float | None = None,
        track_grads: bool = True,
        grad_tol: float | None = None,
        track_activations: bool = False,
        activation_tol: float | None = None,
        resync: bool = False,
        noise: Paths = (),
        rename: Mapping[str, str] | Sequence[str] | None = None,
        map: str | os.PathLike[str] | None = None,  # noqa: A002  as in the commands
        accept: str | os.PathLike[str] | None = None,
        select: str | Iterable[str] = "*",
        record: Mapping[str, Any] | None = None,
        output: str | os.PathLike[str] | None = None,
        file: IO[str] | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        problems: list[Problem] = []
        given = [
            stepped(one, name=name, loss=loss, problems=problems)
            for name, one in (("baseline", baseline), ("candidate", candidate))
        ]
        refuse_one_for_both(given, problems)
        self._settings = lockstep_settings(
            num_batches=num_batches, test_every=test_every, status_every=status_every,
            tracked={
                "params": track_params, "loss": track_loss, "grads": track_grads, "activations": track_activations,
            },
            tolerances={"params": param_tol, "loss": loss_tol, "grads": grad_tol, "activations": activation_tol},
            resync=resync, noise=noise, rename=rename, map=map, accept=accept, select=select, output=output,
            timeout_seconds=timeout_seconds,
            problems=problems,
        )  # fmt: skip
        sides = [one for one in given if one is not None]
        self.comparison: Comparison | None = None
        self._data = baseline.batches if data is None and isinstance(baseline, Training) else data
        self._guard = BatchGuard()
        self._number = 0
        self._ranks = Ranks(self._settings.timeout_seconds)
        copies, floors = self._copies(sides[0])
        shown = self._settings.num_batches or self._length
        total = self._num_on_all_ranks()
        self._printer = Printer(
            self._settings, total=shown, last=total and total - 1, rank=self._ranks.rank, file=file
        )  # fmt: skip
        self._printer.begin(floors)
        self._sides: list[LiveSide] = []
        try:
            for one, name in zip(sides, ("baseline", "candidate"), strict=True):
                self._sides.append(LiveSide(one, self._settings, name=name, record=record or {}, total=total))
            for one, kind in zip(copies, REPLICAS, strict=False):
                name = f"baseline, {kind}"
                self._sides.append(
                    LiveSide(one, self._settings, name=name, record=record or {}, total=total, replica=kind)
                )
            self._live = LiveComparison(
                [one.name for one in self._sides], world_size=self._ranks.size, tolerances=self._settings.by_phase,
                rename=self._settings.rename, noise=self._settings.noise, entries=self._settings.entries,
                accepted=self._settings.accepted,
            )  # fmt: skip
            self._exchange = Exchange(self._ranks, self._sides, self._live)
            self._printer.settings(*(side.settings() for side in self._sides[:2]))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if error is None and self.comparison is None and self._number:
            self.finish()
        elif error is not None:
            self._ranks.fail(f"{type(error).__name__}: {error}")
        self.close()

    @property
    def passed(self) -> bool:
        """True if everything that was compared agrees; False as long as that is unknown."""
        return self.comparison is not None and self.comparison.exit_code == 0

    def go(self) -> Comparison:
        """Train on all batches, or up to the first one in which the sides diverge.

        Returns:
            The comparison, on every rank: `verdict` and `first_divergence` describe the result. Use `passed` as a
            condition: the returned object is always true.

        Raises:
            ConfigError: There is nothing to train on.
            LockstepError: Another rank has run out of batches or failed, or the sides step at different times.
        """
        data = self._data
        if data is None or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            fix = "Give Lockstep(baseline, candidate, batches), or call step(batch) for each batch, then finish()."
            self.close()
            what = "was not given." if data is None else f"is {type_of(data)}, which holds no batches."
            problem = Problem(where="Lockstep(data=...)", what=what, fix=fix)
            raise ConfigError("Lockstep.go()", [problem], consequence="nothing was trained")
        with self._told_to_others():
            for batch in self._batches(data):
                if not self._train(batch) and not self._settings.resync:
                    break
        return self._finish()

    def step(self, batch: Any) -> bool:
        """Train both sides on one batch, in a loop of your own; `finish` ends it.

        Args:
            batch: The batch of this rank.

        Returns:
            True if the sides agree in what was compared of this batch; the same on every rank.

        Raises:
            LockstepError: See `go`.
        """
        with self._told_to_others():
            self._all_have_one(has_one=True)
            return self._train(batch)

    def finish(self) -> Comparison:
        """End a loop of your own: print the outcome, release both sides, and return the comparison."""
        with self._told_to_others():
            self._all_have_one(has_one=False)
        return self._finish()

    def close(self) -> None:
        """Release both sides. Later calls do nothing."""
        sides, self._sides = self._sides, []
        for side in reversed(sides):
            side.recorder.close()

    @property
    def _length(self) -> int | None:
        """Number of batches that the data has; None if it is unknown."""
        return len(self._data) if isinstance(self._data, Sized) else None

    def _num_on_all_ranks(self) -> int | None:
        """Number of batches that all ranks have; None if it is unknown."""
        known = (one for one in (self._settings.num_batches, self._length) if one is not None)
        (least,) = min(self._ranks.meet([min(known, default=math.inf)]))
        return int(least) if math.isfinite(least) else None

    def _copies(self, baseline: Training) -> tuple[list[Training], str]:
        """Copies of the baseline that measure its noise, and the source of the tolerances that the user left out."""
        if not self._settings.measures or self._settings.noise:
            return [], "measured"
        why = uncopyable(baseline)
        copies: list[Training] = []
        if not why:
            with suppress(Exception):  # if a model cannot be copied, noise floors follow from rounding
                copies = copied(baseline)
        can = all(flag for (flag,) in self._ranks.meet([bool(copies)]))
        return (copies, "measured") if can else ([], "uncalibrated")

    def _batches(self, data: Iterable[Any]) -> Iterator[Any]:
        """The batches, as long as all ranks have one."""
        batches = iter(data)
        while self._settings.num_batches is None or self._number < self._settings.num_batches:
            with noted(
                f"traindiff.Lockstep: raised when batch {self._number} was asked for, on rank {self._ranks.rank}."
            ):
                batch = next(batches, _NO_MORE)
            if not self._all_have_one(has_one=batch is not _NO_MORE):
                return
            yield batch

    def _all_have_one(self, *, has_one: bool) -> bool:
        """True if there is another batch; all ranks must agree."""
        have = [bool(flag) for (flag,) in self._ranks.meet([has_one])]
        if len(set(have)) > 1:
            without = [str(rank) for rank, one in enumerate(have) if not one]
            enough = f", or num_batches={self._number}" if self._number else ""
            raise LockstepError(
                f"{'Rank' if len(without) == 1 else 'Ranks'} {', '.join(without)} ran out of batches after "
                f"{self._number}, and rank {have.index(True)} has more. Give all ranks as many{enough}."
            )
        return has_one

    def _train(self, batch: Any) -> bool:
        """Train all sides on a batch, compare them, and return True if they agree."""
        number, self._number = self._number, self._number + 1
        train_all(self._sides, batch, self._guard, where=f"batch {number}, on rank {self._ranks.rank}")
        outcome = self._exchange.after_batch(wants_losses=self._printer.wants_losses(number))
        self._printer.settings(*(side.settings() for side in self._sides[:2]))
        self._printer.batch(number, outcome, self._live)
        if outcome.diverged and self._settings.resync:
            self._printer.set_back(set_back(self._sides[0], self._sides[1], self._ranks, self._settings.rename))
            self._exchange.begin_again()
        return not outcome.diverged

    def _finish(self) -> Comparison:
        with self._told_to_others():
            if not self._number:
                fix = "Give batches, the same number on all ranks."
                problem = Problem(where="Lockstep(data=...)", what="has no batch.", fix=fix)
                raise ConfigError("Lockstep", [problem], consequence="nothing was trained")
            self._printer.last_status(self._number - 1, self._exchange.losses)
            self.comparison = self._exchange.result()
        self._printer.end(self.comparison, passed=self.passed)
        self.close()
        return self.comparison

    @contextmanager
    def _told_to_others(self) -> Iterator[None]:
        """Tell the other ranks if this one fails; if another rank failed first, raise its reason."""
        try:
            yield
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError):  # an engine's collective may have lost the rank that failed first
                self._ranks.raise_failure(patience_seconds=LOOK_SECONDS)
            self._ranks.fail(f"{type(error).__name__}: {error} {' '.join(getattr(error, '__notes__', ()))}".rstrip())
            raise
