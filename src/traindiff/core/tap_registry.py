"""Every tap, with what turns it on and what is unknown if it fails. A new tap is one file and one entry here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from traindiff.core.observation import (
    CARRIED,
    CLEARED,
    DRAWS,
    ESTIMATE,
    FLIPPED,
    OPERATOR,
    PRODUCT,
    RECOMPUTED_OPERATOR,
    RECOMPUTED_PRODUCT,
    SAMPLE,
    WITNESS,
    WITNESSED_PRODUCT,
)
from traindiff.core.site import PHASES

Losses = tuple[tuple[str, str | None], ...]
"""Phases, each with one stage of it, or None for all of it; an empty phase is all of them."""

EVERYTHING: Losses = (("", None),)

_ACTIVATIONS: Losses = (("forward", None), ("backward", None))
_BATCH: Losses = (("batch", None),)
_LOSS: Losses = (("loss", None),)
_PARAMETERS: Losses = (("param", None), ("update", None))
_STEP: Losses = (("grad", ""), ("grad", WITNESS), ("optimizer", None), *_PARAMETERS)
_OPERATORS: Losses = tuple(
    (phase, stage) for stage in (OPERATOR, RECOMPUTED_OPERATOR) for phase in ("forward", "backward")
)
_PRODUCTS: Losses = tuple(
    (phase, stage) for stage in (PRODUCT, RECOMPUTED_PRODUCT, FLIPPED) for phase in ("forward", "backward")
)
_BEFORE_REDUCTION: Losses = (("backward", None), ("grad", "micro"), ("grad", WITNESS))
_STAGES: Losses = (("grad", "reduced"), ("grad", "unscaled"), ("grad", "clipped"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """A tap, or a part of one that can fail alone.

    Attributes:
        name: Name under which its faults are reported. Unless it is a part of another one, a tap is the module of this
            name in `traindiff.observe.torch.hooks`, with a function `attach(context)`.
        observe: Names in `record(observe=...)`, each of which turns it on; empty if it is always on. Names that are
            not phases are its own.
        by_default: Whether its own names are observed by default.
        loses: Phases and stages that are unknown if it fails. A stage that is listed here is recorded only if one of
            the tap's own names is chosen.
        part_of: The tap, or part of the session, that attaches it; empty if the session calls its `attach`.
    """

    name: str
    observe: tuple[str, ...] = ()
    by_default: bool = False
    loses: Losses = EVERYTHING
    part_of: str = ""

    @property
    def own(self) -> tuple[str, ...]:
        """Its names that are not phases."""
        return tuple(name for name in self.observe if name not in PHASES)

    def is_wanted(self, observe: frozenset[str]) -> bool:
        """True if it is attached when these names are observed."""
        return not self.observe or not observe.isdisjoint(self.observe)


TAPS: tuple[Tap, ...] = (
    Tap(name="pipeline_calls"),
    Tap(name="uneven_inputs"),
    Tap(name="surroundings", loses=()),
    Tap(name="backward_calls", loses=_LOSS),
    Tap(name="loss", part_of="backward_calls", loses=_LOSS),
    Tap(name="loss_scale", observe=("loss", "backward", "grad")),
    Tap(name="module_outputs", observe=("forward", "backward"), loses=_ACTIVATIONS),
    Tap(name="random_draws", observe=("forward",), loses=(("forward", DRAWS),)),
    Tap(name="spectral_norms", observe=("forward",), loses=(("forward", ESTIMATE),)),
    Tap(name="inspect", observe=("forward", "backward"), loses=_ACTIVATIONS),
    # Behind the modules' own hooks: the root's output still belongs to the forward pass that this one ends.
    Tap(name="root_forward"),
    Tap(name="batch", part_of="root_forward", loses=_BATCH),
    # Behind the one that follows forward passes, which says what the batch is.
    Tap(name="samples", observe=("samples",), by_default=True, loses=(("batch", SAMPLE),)),
    Tap(name="dataloader", observe=("dataloader",), loses=(("batch", "loaded"),)),
    # Innermost, so that what a module computes is seen and what other taps do with its output is not.
    Tap(name="operators", observe=("operators",), loses=_OPERATORS),
    Tap(name="products", observe=("products",), loses=_PRODUCTS),
    Tap(name="model_state", observe=("param", "update"), loses=_PARAMETERS),
    Tap(name="parameter_gradients", observe=("grad.micro",), loses=(("grad", "micro"),)),
    Tap(name="gradient_stages", observe=("grad", "grad.stages"), loses=_STAGES),
    Tap(name="carried_gradients", observe=("grad",), loses=(("grad", CARRIED),)),
    Tap(name="cleared_gradients", observe=("grad",), loses=(("grad", CLEARED),)),
    Tap(name="gradient_marks", observe=("witness",), loses=(("grad", FLIPPED),)),
    Tap(name="state_marks", observe=("witness",), loses=()),
    Tap(
        name="layer_products",
        observe=("witness",),
        loses=(("forward", WITNESSED_PRODUCT), ("backward", WITNESSED_PRODUCT)),
    ),
    Tap(name="witness", observe=("witness",), loses=(("grad", WITNESS),)),
    Tap(name="optimizer_replay", part_of="optimizers", observe=("replay",), by_default=True, loses=(("update", None),)),
    Tap(name="optimizer_step", part_of="optimizers", loses=_STEP),
    Tap(name="optimizer_discovery", part_of="optimizers", loses=_STEP),
    Tap(name="upkeep", part_of="session"),
    Tap(name="divisors", part_of="session", loses=_BEFORE_REDUCTION),
    Tap(name="batch_axis", part_of="session", loses=()),
    Tap(name="log", part_of="session", loses=_LOSS),
    Tap(name="compacting", part_of="session", loses=()),
)
"""In the order in which they are attached: hooks on one module or call run in this order."""

OBSERVED_BY_DEFAULT = (*PHASES, *dict.fromkeys(name for tap in TAPS if tap.by_default for name in tap.own))
"""Names that are observed by default."""

NOT_BY_DEFAULT = tuple(dict.fromkeys(name for tap in TAPS if not tap.by_default for name in tap.own))
"""Names that are observed only if they are chosen."""

OBSERVABLE = (*OBSERVED_BY_DEFAULT, *NOT_BY_DEFAULT)
"""Names that `record(observe=...)` accepts: phases, and the own names of taps."""

LOSES = {tap.name: tap.loses for tap in TAPS}
"""Phases and stages that are unknown if a tap fails, by its name."""

_BY_STAGE = {loss: name for tap in TAPS for name in tap.own for loss in tap.loses if loss[1] is not None}


def asked_for_as(phase: str, stage: str) -> str:
    """The name in `record(observe=...)` that a run needs to observe this stage of a phase."""
    return _BY_STAGE.get((phase, stage), phase)


def shows(observe: frozenset[str], what: str) -> bool:
    """True if a run that was asked for some names in `record(observe=...)` shows what another name asks for.

    Updates show the parameters, too. Without names it is not known what was asked for, and the answer is True.
    """
    return shows_any(observe, (what, "update") if what == "param" else (what,))


def shows_any(observe: frozenset[str], names: Iterable[str]) -> bool:
    """True if a run was asked for one of some names in `record(observe=...)`, or if that is not known."""
    return not observe or not observe.isdisjoint(names)
