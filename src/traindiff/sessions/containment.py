"""Keep errors of traindiff's own out of the training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.compiler import is_compiling

from traindiff.replicas.replica import NAME as REPLICA
from traindiff.sessions.faults import Faults
from traindiff.taps._torch_compat import is_tracing, run_as_it_is
from traindiff.taps.left_behind import LeftBehind
from traindiff.taps.out_of_sight import out_of_sight

_REPLICA_FAILED = (
    "traindiff no longer perturbs the training: {says}. The training goes on; the recording says that it is no full "
    "replica, and no floors can be measured from it."
)


class _Guard(LeftBehind):
    """A hook made harmless."""

    def __init__(
        self, containment: Containment, tap: str, hook: Callable[..., Any], *, always: bool, alters: bool = False
    ) -> None:
        self._containment = containment
        self._tap = tap
        self._hook = hook
        self._always = always
        self._alters = alters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_compiling() or is_tracing():
            return None  # compiled code is observed by operators; see traindiff.taps.compiled
        hook = partial(self._hook, *args, **kwargs)
        result = self._containment.run(self._tap, hook, always=self._always, alters=self._alters)
        return result if self._alters else None


run_as_it_is(_Guard.__call__, callees=True)


class Containment(Faults):
    """Runs torch's hooks so that an error in one disables the tap it belongs to and goes no further.

    No mode of the training sees what they compute; see `traindiff.taps.out_of_sight`. Args are those of `Faults`.

    Attributes:
        paused: No hook is run but those that clean up: another training is running, beside the one that is observed.
    """

    def run(self, tap: str, hook: Callable[[], Any], *, always: bool = False, alters: bool = False) -> Any:
        """See `Faults.run`. `alters` says that the training goes on with what `hook` returns."""
        with out_of_sight(functions=not alters):
            return super().run(tap, hook, always=always)

    def guarded(self, tap: str, hook: Callable[..., None], *, always: bool = False) -> Callable[..., Any]:
        """`hook`, made harmless. It returns None, which tells torch to change nothing.

        Args:
            tap: What an error disables.
            hook: Observes something, or cleans up.
            always: Run it even after the tap was disabled, because it cleans up.
        """
        return _Guard(self, tap, hook, always=always)

    def altering(self, tap: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """`hook`, made harmless; torch uses what it returns in place of what it was given, unless that is None."""
        return _Guard(self, tap, hook, always=False, alters=True)

    def template(self, tap: str) -> str:
        """See `Faults.template`."""
        return _REPLICA_FAILED if tap.startswith(REPLICA) else super().template(tap)
