"""What taps hand their tensors to."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from traindiff.observation import Merge
    from traindiff.region import Region
    from traindiff.shards import Shard
    from traindiff.taps.progress import Progress


class Sink(Protocol):
    """Receives what the taps see, on the thread that runs the training."""

    progress: Progress

    def emit(
        self,
        tensor: Tensor,
        *,
        phase: str,
        path: str,
        slot: str,
        stage: str = "",
        call: int = 0,
        micro_step: int | None = None,
        optimizer: str | None = None,
        shard: Shard | None = None,
        merge: Merge = "shard",
        weight: float = 1.0,
        region: Region | None = None,
        scaled: bool | None = None,
    ) -> None:
        """Summarise `tensor` now; what is left out comes from `progress`, or means the whole tensor.

        `region` says what of a larger tensor a plain one is that other ranks hold the rest of, and `shard` is then said
        of that one. `scaled` says whether the loss scale is in it; left out, that follows from its phase and stage.
        """

    def unobserved(
        self, reason: str, *, phase: str, path: str, slot: str, stage: str = "", optimizer: str | None = None
    ) -> None:
        """Record that there is nothing to summarise at a site, and why."""

    def together(self) -> AbstractContextManager[None]:
        """Inside it, `emit` may put tensors off to its end, and summarise them together."""

    def guarded(self, tap: str, hook: Callable[..., None]) -> Callable[..., Any]:
        """`hook`, made harmless: an error in it disables the tap and never reaches the training."""

    def altering(self, tap: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a hook that changes the training: what it returns is used, unless that is None."""
