"""All taps of a session, attached to one training, and kept attached if it removes hooks or replaces what it trains."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from itertools import chain, compress
from operator import is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from traindiff.core.settings import RecordSettings
from traindiff.core.site import canonical_paths, path_in_whole
from traindiff.core.tap_registry import TAPS
from traindiff.core.torch_compat.training import (
    buffers_by_name,
    buffers_of,
    children_of,
    modules_by_name,
    modules_in,
    parameters_by_name,
    parameters_in,
    parameters_of,
)
from traindiff.errors import TraindiffWarning, level_of_caller
from traindiff.observe.common.batch_axis import BatchAxis
from traindiff.observe.common.sink import Sink
from traindiff.observe.common.user_input import is_selected
from traindiff.observe.torch.hooks import swapped_tensors
from traindiff.observe.torch.hooks.compiled import trace_hooks
from traindiff.observe.torch.hooks.context import TapContext
from traindiff.observe.torch.hooks.followed_modules import takes_hooks
from traindiff.observe.torch.hooks.inert_on_copy import leave_hooks_behind
from traindiff.observe.torch.perturb.replica import Replica, notice_compiled
from traindiff.observe.torch.session.configuration import Configuration
from traindiff.observe.torch.session.followed_optimizers import FollowedOptimizers
from traindiff.observe.torch.session.observations import Containment
from traindiff.observe.torch.session.targets import Targets
from traindiff.observe.torch.sharding.layout import Layout
from traindiff.observe.torch.sharding.registry import ENGINES

_values: Callable[[Any], Iterable[Any]] = methodcaller("values")
"""The values of anything like a dict; `dict.values` is twice as quick."""

_LISTED = "traindiff show RECORDING lists the sites that there are."


class Attachment:
    """The taps that the settings ask for, from construction until `close`.

    Args:
        targets: What is observed.
        settings: Which phases are observed, and how.
        sink: Receives the observations.
        replica: Perturbs the training; None for the training as it is.
        before_every_step: Record parameters before each step, not only after a step that was not recorded.
        set_back: Parameters are set back to another run's between steps.
        on_step: Called with an optimizer's name when an observed step of it has ended.
        on_discovery: Called when more is known of this rank, e.g. an optimizer that was not given.
        containment: Guards hooks.
        on_schedule: Called with the root, a pipeline's schedule, and its stages on this rank, before it runs a batch.
        on_backward: Called before each backward pass that can reach the model's parameters.
        on_joined: Called with the number of steps that other ranks have taken, and for which this one had no inputs.

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
        set_back: bool = False,
        on_step: Callable[[str], None],
        on_discovery: Callable[[], None],
        on_schedule: Callable[[nn.Module, Any, list[Any]], None],
        on_backward: Callable[[], None],
        on_joined: Callable[[int], None],
        containment: Containment,
    ) -> None:
        self._targets = targets
        self._described: dict[str, Any] = {}
        self._configuration = Configuration()
        context = TapContext(
            targets=targets,
            sink=sink,
            containment=containment,
            # An update is the difference of two observations of a parameter.
            observe=settings.observe | ({"param"} if "update" in settings.observe else frozenset()),
            settings=settings,
            before_every_step=before_every_step,
            set_back=set_back,
            batch_axis=BatchAxis(settings.batch_axis, targets.modules),
            describe=self._describe,
        )
        self._events = context.events
        self._guarded = sink.guarded
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
        self._events.at_backward.append(sink.guarded("divisors", on_backward))
        self._undo = context.undo
        with ExitStack() as on_error:
            undo = on_error.enter_context(context.undo)
            if replica:  # before the taps, which see what it did
                undo.enter_context(replica.attach(sink))
                undo.enter_context(notice_compiled(targets.root, sink))
            for tap in TAPS:
                if not tap.part_of and tap.is_wanted(context.observe):
                    import_module(f"traindiff.observe.torch.hooks.{tap.name}").attach(context)
            self._events.on_joined.append(on_joined)  # after the taps, which belong to the step before
            upkeep.attach()
            self.optimizers.attach()  # whose steps are to be known before the rest is looked at
            undo.enter_context(trace_hooks())
            undo.enter_context(swapped_tensors.attach(self))
            undo.enter_context(leave_hooks_behind([*modules_in(targets.root), *targets.optimizers.values()]))
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

    def describe_at_end(self, name: str, value: Callable[[], Any]) -> None:
        """Put what `value` returns when the session ends into `rank.json`."""
        self._events.at_end.append(self._guarded("describe", lambda: self._describe(name, value())))

    def settle(self) -> None:
        """End the steps that optimizers made in compiled code, which has returned by now."""
        self.optimizers.settle()

    def catch_up(self) -> None:
        """Find out where the training is now."""
        self.settle()
        self._events.on_asking()

    def _describe(self, name: str, value: Any) -> None:
        """Put a value into `rank.json`, and have that written."""
        self._described[name] = value
        self._on_discovery()

    def describe(self) -> dict[str, Any]:
        """Names, shapes, dtypes and settings of what is observed, for `rank.json`."""
        return {
            **self._targets.describe(),
            "module_settings": self._configuration.of(self._targets.modules),
            "optimizers": self.optimizers.describe(),
            **self._described,
        }


def _report_unused(batch_axis: BatchAxis, layout: Layout) -> None:
    if patterns := batch_axis.unused:
        message = (
            f"record(batch_axis=...): nothing that was observed matches {' or '.join(map(repr, patterns))}. {_LISTED}"
        )
        warnings.warn(message, TraindiffWarning, stacklevel=level_of_caller())
    for message in layout.declarations.unused:
        warnings.warn(f"record(shards=...): {message} {_LISTED}", TraindiffWarning, stacklevel=level_of_caller())


class Upkeep:
    """Checks several times in each step that all hooks are there and that the model has the same parts as before.

    All modules are checked before and after each forward pass of a root: a hook that is missing after the pass was
    lost in it, and a hook that is missing before it is restored in time. Before a backward pass and before the step of
    the optimizer, only the modules that the training loop calls are checked: without their hooks no forward pass is
    seen.

    A module or parameter that is still part of the model keeps its path, wherever it is now. A new one takes the path
    under which it is found, and so replaces the one that had this path and is no longer part of the model. After a
    step, those are let go of that neither the model nor an optimizer holds.

    A check of 1,000 modules takes about 0.3 ms: it looks up dicts and reads no tensor.

    Args:
        context: The training, as taps see it; the mappings of its targets are changed.
        on_change: Called when the model has other parts than before.
    """

    def __init__(self, context: TapContext, *, on_change: Callable[[], None]) -> None:
        self._context = context
        self._targets = context.targets
        self._followed = context.followed
        self._on_change = on_change
        # An engine that exchanges parameters for its own says itself what they are.
        self._replaces_parameters = not (context.targets.layout.flat or context.targets.gathering)
        self._may_hold_others = False  # the model has changed since the latest look for what is no part of it
        self._note()

    def attach(self) -> None:
        """Have the training looked at in these events, which end with the session."""
        guarded, events = partial(self._context.sink.guarded, "upkeep"), self._context.events
        events.before_forward.insert(0, guarded(self._before_forward))
        events.after_forward.append(guarded(self._after_forward))
        events.at_backward.append(guarded(partial(self._followed.look, called=True, everywhere=False)))
        events.after_step.append(guarded(self._after_step))

    def before_optimizer(self) -> None:
        """An optimizer is about to step."""
        self._context.events.on_asking()
        self._update(parameters=True)
        # Every forward pass that counts has a backward pass, so none was missed since the last backward pass.
        self._followed.look(called=not self._context.sink.progress.backward_done, everywhere=False)

    def _before_forward(self) -> None:
        self._update(parameters=torch.is_grad_enabled())
        self._followed.look(called=False, everywhere=self._context.sink.progress.observing)

    def _after_forward(self) -> None:
        self._followed.look(called=True, everywhere=self._context.sink.progress.observing)

    def _after_step(self) -> None:
        if not self._context.sink.progress.unseen:  # an unseen step has ended earlier
            self._update(parameters=True)
            if self._may_hold_others and not self._is_exchanged():
                self._may_hold_others = self._let_go()
            self._followed.look(called=False, everywhere=True)

    def _update(self, *, parameters: bool) -> None:
        """Note what was replaced since the last call.

        Args:
            parameters: The parameters are those that are trained, and not exchanged temporarily.
        """
        if not self._is_changed():
            return
        self._may_hold_others = True
        found = self._new_modules() | self._new_buffers()
        if parameters and self._replaces_parameters:
            found |= self._new_parameters()
        self._note()
        if found:
            self._on_change()

    def _note(self) -> None:
        """Remember the tree. Its modules and parameters are kept alive, so that no other object gets the id of one.

        Other tensors in the place of parameters, for one call, are not: they hold a graph.
        """
        self._tree = [*modules_in(self._targets.root)]
        held = chain.from_iterable((children_of(one), parameters_of(one)) for one in self._tree)
        self._values = dict.values if {*map(type, held)} <= {dict, OrderedDict} else _values
        self._counts, parts = self._look()
        self._parts = [*parts]
        self._for_a_call = {index: id(one) for index, one in enumerate(self._parts) if _is_for_a_call(one)}
        for index in self._for_a_call:
            self._parts[index] = None

    def _is_changed(self) -> bool:
        counts, parts = self._look()
        if counts != self._counts:
            return True
        try:
            if self._for_a_call:
                parts = now = [*parts]
                for index, key in self._for_a_call.items():
                    now[index] = None if id(now[index]) == key else self
            return not all(map(is_, parts, self._parts))
        except TypeError:  # something else has taken the place of a dict
            return True

    def _look(self) -> tuple[list[int], Iterable[Any]]:
        """The parts of all modules, one after the other, and how many each module has. It is quick; see above.

        Buffers are counted only: a training may put others in their place in every step.
        """
        held: list[dict[str, Any]] = [*map(children_of, self._tree)]
        if self._replaces_parameters:
            held += map(parameters_of, self._tree)
        counts = [*map(len, held), *map(len, map(buffers_of, self._tree))]
        return counts, chain.from_iterable(map(self._values, compress(held, counts)))

    def _new_modules(self) -> bool:
        modules: Any = self._targets.modules
        present = modules_by_name(self._targets.root, tied=True)
        alive = {id(one) for one in present.values()}
        known = {id(one) for one in modules.values()}
        changed = False
        for name, path in canonical_paths(present).items():
            module = present[name]
            if id(module) in known or not takes_hooks(module) or not is_selected(self._targets.select, path):
                continue
            held = modules.get(path)
            if held is not None and id(held) in alive:
                continue  # the module with this path has been wrapped
            modules[path] = module
            known.add(id(module))
            changed = True
            if held is None:
                self._followed.grow(path, module)
            else:
                self._followed.replace(path, module)
        return changed

    def _new_buffers(self) -> bool:
        buffers: Any = self._targets.buffers
        kept = {id(module): path for path, module in self._targets.modules.items()}
        present = buffers_by_name(self._targets.root)
        known = present.keys() & buffers.values()
        changed = False
        for name, path in canonical_paths(present).items():
            around, _, own = name.rpartition(".")
            if name in known:
                continue
            holder = kept.get(id(self._targets.root.get_submodule(around)))
            where = path if holder is None else f"{path_in_whole(holder)}.{own}".lstrip(".")
            if buffers.get(where) not in present and is_selected(self._targets.select, where):
                buffers[where] = name
                changed = True
        return changed

    def _new_parameters(self) -> bool:
        names: Any = self._targets.names
        parameters: Any = self._targets.parameters
        present = parameters_by_name(self._targets.root)
        alive = {id(one) for one in present.values()}
        by_path = {path: key for key, path in names.items()}
        changed = False
        for name, found in canonical_paths(present).items():
            parameter = present[name]
            if id(parameter) in names or not isinstance(parameter, nn.Parameter) or _is_of_engine(parameter):
                continue
            path = self._targets.first_name(found)
            if by_path.get(path) in alive:
                path = found  # it was tied to another parameter before
            if by_path.get(path) in alive:
                continue
            names.pop(by_path.get(path), None)
            names[id(parameter)] = path
            by_path[path] = id(parameter)
            if path in parameters or is_selected(self._targets.select, path):
                parameters[path] = parameter
            self._targets.changes.number += 1
            changed = True
        return changed

    def _is_exchanged(self) -> bool:
        """True if parameters are exchanged for one call, as `torch.func.functional_call` does."""
        return any(map(_is_for_a_call, chain.from_iterable(map(_values, map(parameters_of, self._tree)))))

    def _let_go(self) -> bool:
        """Let go of modules and parameters that neither the model nor an optimizer holds.

        Returns:
            True if an optimizer alone holds some.
        """
        targets, present = self._targets, {id(module) for module in self._tree}
        outside = {path: module for path, module in targets.modules.items() if id(module) not in present}
        lost: set[int] = set()
        if self._replaces_parameters:
            lost = targets.names.keys() - {id(one) for one in parameters_in(targets.root)} - targets.of_no_module
        if not (outside or lost):
            return False
        held = {id(parameter) for one in self._context.optimizers.values() for _, parameter, _ in one.held()}
        gone = {path: one for path, one in outside.items() if held.isdisjoint(map(id, parameters_in(one)))}
        if gone or lost - held:
            targets.let_go(gone, lost - held)
            self._followed.forget(gone.values())
            self._on_change()
        return len(gone) < len(outside) or not held.isdisjoint(lost)


def _is_for_a_call(part: Any) -> bool:
    """True for a tensor in the place of a parameter that is none."""
    return isinstance(part, Tensor) and not isinstance(part, nn.Parameter)


def _is_of_engine(parameter: nn.Parameter) -> bool:
    return any(engine.global_shape(parameter) is not None for engine in ENGINES)
