"""All taps of a session, attached to one training."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from traindiff.core.settings import RecordSettings
from traindiff.core.tap_registry import TAPS
from traindiff.errors import TraindiffWarning, level_of_caller
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.sink import Sink
from traindiff.observe.torch.hooks.compiled import trace_hooks
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.inert_on_copy import hide_from_scripting, leave_hooks_behind
from traindiff.observe.torch.perturb.replica import Replica, notice_compiled
from traindiff.observe.torch.session.followed_optimizers import FollowedOptimizers
from traindiff.observe.torch.session.observations import Containment
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.session.upkeep import Upkeep
from traindiff.observe.torch.sharding.layout import Layout

_LISTED = "traindiff show RECORDING lists the sites that there are."


class Attachment:
    """The taps that the settings ask for, from construction until `close`.

    Args:
        targets: What is observed.
        settings: Which phases are observed, and how.
        sink: Receives the observations.
        replica: Perturbs the training; None for the training as it is.
        before_every_step: Record parameters before each step, not only after a step that was not recorded.
        on_step: Called with an optimizer's name when an observed step of it has ended.
        on_discovery: Called when more is known of this rank, e.g. an optimizer that was not given.
        containment: Guards hooks.
        on_schedule: Called with the root, a pipeline's schedule, and its stages on this rank, before it runs a batch.

    Attributes:
        optimizers: The optimizers that are followed.
    """

    def __init__(
        self,
        targets: Targets,
        settings: RecordSettings,
        sink: Sink,
        *,
        replica: Replica | None,
        before_every_step: bool,
        on_step: Callable[[str], None],
        on_discovery: Callable[[], None],
        on_schedule: Callable[[nn.Module, Any, list[Any]], None],
        containment: Containment,
    ) -> None:
        self._targets = targets
        self._described: dict[str, Any] = {}
        context = TapContext(
            targets=targets,
            sink=sink,
            containment=containment,
            # An update is the difference of two observations of a parameter.
            observe=settings.observe | ({"param"} if "update" in settings.observe else frozenset()),
            evaluation=settings.evaluation,
            counts_skipped=settings.counts_skipped,
            before_every_step=before_every_step,
            batch_axis=BatchAxis(settings.batch_axis, targets.modules),
            describe=self._describe,
        )
        self._events = context.events
        self._on_discovery = on_discovery
        upkeep = Upkeep(context, on_change=on_discovery)
        self.optimizers = FollowedOptimizers(
            context,
            on_step=on_step,
            on_discovery=on_discovery,
            before_step=upkeep.before_optimizer,
        )
        self._events.before_forward.append(self.settle)
        self._events.on_schedule.append(partial(on_schedule, targets.root))
        self._undo = context.undo
        with ExitStack() as on_error:
            undo = on_error.enter_context(context.undo)
            if replica:  # before the taps, which see what it did
                undo.enter_context(replica.attach(sink))
                undo.enter_context(notice_compiled(targets.root, sink))
            for tap in TAPS:
                if not tap.part_of and tap.is_wanted(context.observe):
                    import_module(f"traindiff.observe.torch.hooks.{tap.name}").attach(context)
            upkeep.attach()
            self.optimizers.attach()  # whose steps are to be known before the rest is looked at
            undo.enter_context(trace_hooks())
            undo.enter_context(hide_from_scripting())
            undo.enter_context(leave_hooks_behind([*targets.root.modules(), *targets.optimizers.values()]))
            on_error.pop_all()
        report = partial(_report_unused, context.batch_axis, targets.layout)
        self._events.at_end.append(sink.guarded("batch_axis", report))

    def close(self) -> None:
        """Remove all taps."""
        self._undo.close()

    def finish(self) -> None:
        """Record what is known only at the end; to be called before the last observations are written."""
        self.settle()
        self.optimizers.end_unseen_steps()
        if elsewhere := self.optimizers.goes_on_elsewhere():
            self._describe("goes_on_elsewhere", elsewhere)
        self._events.at_end()

    def settle(self) -> None:
        """End the steps that optimizers made in compiled code, which has returned by now."""
        self.optimizers.settle()

    def _describe(self, name: str, value: Any) -> None:
        """Put a value into `rank.json`, and have that written."""
        self._described[name] = value
        self._on_discovery()

    def describe(self) -> dict[str, Any]:
        """Names, shapes and dtypes of what is observed, for `rank.json`."""
        return {**self._targets.describe(), "optimizers": self.optimizers.describe(), **self._described}


def _report_unused(batch_axis: BatchAxis, layout: Layout) -> None:
    if patterns := batch_axis.unused:
        message = (
            f"record(batch_axis=...): nothing that was observed matches {' or '.join(map(repr, patterns))}. {_LISTED}"
        )
        warnings.warn(message, TraindiffWarning, stacklevel=level_of_caller())
    for message in layout.declarations.unused:
        warnings.warn(f"record(shards=...): {message} {_LISTED}", TraindiffWarning, stacklevel=level_of_caller())
