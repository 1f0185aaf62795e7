"""Modules that do not do what their settings, or those around them, ask for: autocast, and frozen stages."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import ClassVar

from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, SiteKey, StepTable
from traindiff.analyse.rules.rule import Contents, Found, Limit, Repeated, RepeatedRule, Rule
from traindiff.core.site import ROOT

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")

_KEEPS_DTYPE = ("Norm", "Embedding")
"""Parts of the names of classes that have a weight, and no product that autocast computes in the shorter dtype."""


class SiblingsShareDtype(RepeatedRule):
    """Under autocast, one layer returns float32, and the layers like it return the shorter dtype.

    Layers are alike if their class and their path are, but for numbers (`layers.2.up` and `layers.3.up`). The rule
    compares layers with a weight of their own (not norms and embeddings), whose products autocast computes in the
    shorter dtype. It needs three of them, most of which return that dtype. Some recipes keep the first or the last
    layer in float32, so these do not count. A layer in the middle may be kept in float32 on purpose, too, so the rule
    only warns.
    """

    name = "missed-by-autocast"
    finds = "Under autocast, one of several layers that are alike computes in float32."
    needs = "autocast"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=3, message="steps in a row in which it must be so"),
        "least_layers": Limit(default=3, message="layers that are alike, below which nothing is usual"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return bool(contents.facts.autocast)

    def _wrong(self, table: StepTable) -> Found | None:
        if not self.facts.autocast:
            return None
        alike: dict[tuple[str, str], list[MergedSite]] = {}
        for key, entry in sites(table, "forward", stage=""):
            kind = self.facts.modules.get(key.path, "")
            if key.slot != "output[0]" or key.call or entry.unobserved:
                continue
            if f"{key.path}.weight" not in self.facts.parameters or any(one in kind for one in _KEEPS_DTYPE):
                continue
            if _NUMBER.search(key.path):
                alike.setdefault((kind, _NUMBER.sub("*", key.path)), []).append(entry)
        found: Found = {}
        for (_, pattern), layers in alike.items():
            missed = [one for one in layers[1:-1] if one.dtype == "float32"]
            short = sum(one.dtype == self.facts.autocast for one in layers)
            if len(layers) < self.limit("least_layers") or not missed or 2 * short <= len(layers):
                continue
            for one in missed:
                found[one.key.path] = (one, {"pattern": pattern, "short": short, "layers": len(layers)})
        return found

    def _message(self, row: Repeated) -> str:
        numbers = row.numbers
        return (
            f"{row.key} returns float32 under autocast to {self.facts.autocast}, in {row.num_steps} steps in a row; "
            f"{numbers['short']} of the {numbers['layers']} layers like it ({numbers['pattern']}) return "
            f"{self.facts.autocast}: autocast does not reach its product. If that is not meant, look for "
            "autocast(enabled=False), and for a function that autocast does not know."
        )


_FEW = 2
"""Parameters below which a module has no stages."""

FREEZING = "frozen_stages"
"""Attribute of a backbone that says how many of its stages are frozen (the convention of the OpenMMLab libraries)."""


class FrozenStagesRest(Rule):
    """A backbone says that it freezes stages, and in the first step all of its parameters have gradients.

    Backbones of the OpenMMLab libraries, and others after them, freeze their first stages when `train()` is called. If
    nothing calls it, these stages are trained. The rule reads the attribute `frozen_stages` when the recording begins.
    In some backbones, 0 freezes the stem, and in others nothing, so only 1 and more count. A user may have thawed the
    stages again on purpose, so the rule only warns.
    """

    name = "frozen-stages"
    finds = "A module has frozen_stages set, and none of its parameters is frozen."
    needs = "a module with frozen_stages"
    warns = True

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return any(FREEZING in settings for settings in contents.facts.settings.values())

    def begin(self) -> None:
        """No step was seen so far."""
        self._declared = {
            path: int(value)
            for path, settings in self.facts.settings.items()
            if (value := settings.get(FREEZING, "")).isdecimal() and int(value) >= 1
        }

    def step(self, table: StepTable, *, step: int) -> Iterator[Finding]:
        """Findings of the first step that has gradients of such a module."""
        for path, stages in list(self._declared.items()):
            prefix = f"{path}." if path else ""
            inside = sorted(name for name in self.facts.parameters if name.startswith(prefix))
            gradients = [table.get(SiteKey("grad", "", name, "grad")) for name in inside]
            present = [one for one in gradients if one is not None and not one.unobserved]
            if not present:
                continue
            del self._declared[path]
            if len(present) < len(inside) or len(inside) < _FEW:
                continue
            message = (
                f"{path or ROOT} has {FREEZING} = {stages}, and all of its {len(inside)} parameters have gradients: no "
                "stage is frozen. Such modules freeze stages in train(): call model.train() before the training."
            )
            yield self.finding(present[0], message, step=step, frozen_stages=stages, num_parameters=len(inside))
