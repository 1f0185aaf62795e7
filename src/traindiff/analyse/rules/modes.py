"""Modules in evaluation mode while they are trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from traindiff.analyse.findings import Finding, more_text
from traindiff.analyse.merge.indexed import sites
from traindiff.analyse.merge.site import MergedSite, StepTable
from traindiff.analyse.rules.rule import Contents, Limit, Rule
from traindiff.core.observation import MODE
from traindiff.core.site import ROOT
from traindiff.core.summary import number

_RATE = "p"
"""Setting of dropout modules: the share that they drop."""


@dataclass(slots=True, kw_only=True)
class _Evaluates:
    """A module that was put into evaluation mode in the middle of the run: the record of that, and the first step."""

    entry: MergedSite
    first: int


class ModelTrainsInTrainingMode(Rule):
    """The model was in training mode, and from a step on it is trained in evaluation mode, until the end of the run.

    Something called `eval()` for an evaluation, and nothing called `train()` after it. Only models for which the mode
    matters are judged: those with dropout or batch normalization. Single modules are put into evaluation mode on
    purpose (statistics that are to stay as they are). Some models are in evaluation mode from the beginning, as
    libraries load them. The rule gives a note about both. A training may turn dropout off for its last steps, so the
    rule only warns about the whole model, too.
    """

    name = "trained-in-evaluation-mode"
    finds = "The model is trained in evaluation mode from a step on."
    needs = "dropout or batch normalization"
    warns = True
    limits: ClassVar[Mapping[str, Limit]] = {
        "least_steps": Limit(default=3, message="steps at the end of the run in which it must be so"),
    }

    def applies(self, contents: Contents) -> bool:
        """True if a step has something that it judges."""
        return any(self._matters(path) for path in contents.facts.modules)

    def begin(self) -> None:
        """Nothing was seen so far."""
        self._began = {path for path, one in self.facts.settings.items() if one.get("training") == "False"}
        self._since: dict[str, _Evaluates] = {}
        self._steps: list[int] = []
        self._first: int | None = None  # the first step

    def step(self, table: StepTable, *, step: int) -> None:
        """Note a step; the findings come at the end."""
        self._steps = [*self._steps[-self._least :], step]
        self._first = step if self._first is None else self._first
        for key, entry in sites(table, stage=MODE):
            if entry.unobserved:
                continue
            self._began.discard(key.path)
            if number(entry.summary):
                self._since.pop(key.path, None)
            else:
                self._since.setdefault(key.path, _Evaluates(entry=entry.without_parts(), first=step))

    def end(self) -> Iterator[Finding]:
        """Findings of the whole run."""
        root, matter = self._since.get(""), self._changed
        if root is None or not matter:
            return
        message = (
            f"The model is in evaluation mode from step {root.first} on, and is trained in it until the end, so "
            f"{_compute(matter)} as in an evaluation. Call model.train() after each evaluation."
        )
        yield self.finding(root.entry, message, step=root.first, modules=matter)

    def notes(self) -> Iterator[str]:
        """Notes on modules that are in evaluation mode and may be meant to be."""
        paths = self._changed if "" not in self._since else []
        always = [path for path in paths if self._since[path].first == self._first]
        later = [path for path in paths if path not in always]
        if always:
            yield f"In all steps, some modules are in evaluation mode: {_named(always)}."
        if later:
            first = min(self._since[path].first for path in later)
            yield (
                f"In the middle of the run (step {first}), some modules go into evaluation mode, and stay in it: "
                f"{_named(later)}."
            )
        if "" in self._began and (paths := sorted(path for path in self._began if self._matters(path))):
            yield f"The model is in evaluation mode in all steps, so {_compute(paths)} as in an evaluation."

    @property
    def _least(self) -> int:
        return max(1, int(self.limit("least_steps")))

    @property
    def _changed(self) -> list[str]:
        """Paths of the modules to which the mode matters, and that are in evaluation mode for the last steps."""
        known = len(self._steps) >= self._least
        since = self._steps[-self._least] if known else -1
        return [path for path, one in self._since.items() if known and one.first <= since and self._matters(path)]

    def _matters(self, path: str) -> bool:
        """True if a module computes something else in evaluation mode."""
        kind, settings = self.facts.modules.get(path, ""), self.facts.settings.get(path, {})
        if "BatchNorm" in kind:
            return settings.get("track_running_stats") != "False"
        return "Dropout" in kind and settings.get(_RATE) not in (None, "0", "0.0")


def _named(paths: list[str]) -> str:
    return f"{paths[0] or ROOT}{more_text(len(paths) - 1, 'module')}"


def _compute(paths: list[str]) -> str:
    return f"{_named(paths)} {'compute' if len(paths) > 1 else 'computes'}"
