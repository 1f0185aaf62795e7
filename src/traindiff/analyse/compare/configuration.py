"""Differences between the settings of two runs' modules, parameters and optimizers, which may explain a finding."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from traindiff.analyse.compare.diagnosis import without_guess
from traindiff.analyse.findings import Finding, more_text, ranks_text
from traindiff.analyse.merge.renames import Rename
from traindiff.analyse.merge.site import StepTable
from traindiff.core.observation import MODE
from traindiff.core.site import ROOT
from traindiff.core.summary import number

_SHORT = re.compile("float16|half|bf16|fp16")
"""Settings that make something round."""

_MOST_NAMED = 8
_GRADIENT = "gradient"
"""Setting of a module that says whether gradients flow through it: a word of `gradient_paths` in `rank.json`."""

_FROZEN = "requires_grad"

_CUT = "no gradient flows back through it"

_WITHOUT_EFFECT = frozenset({"class", "forward", "inplace"})
"""Settings that often differ between runs that compute the same; they explain a finding, and are not listed."""


_EXPLAINS: Mapping[str, Collection[str]] = {
    "torch": ("forward", "loss", "backward", "grad"),
    "autocast": ("forward", "loss", "backward", "grad"),
    "scaler": ("backward", "grad"),
    "scheduler": ("optimizer", "update"),
}
"""Phases of a first divergence that a difference around the computation may explain, by what differs."""


def _what(where: str) -> str:
    """`scheduler` of `optimizer scheduler[1]`."""
    return where.rpartition(" ")[2].partition("[")[0]


def _around(*runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """What differs around the computation, as clauses by name: flags, autocast, the scaler, schedulers."""
    sides = []
    for contents in runs:
        found: dict[str, Mapping[str, str]] = {}
        for content in contents:
            for where, settings in content.get("surroundings", {}).items():
                found.setdefault(where, settings)
        sides.append(found)
    if not all(sides):
        return {}  # one run does not record them
    before, after = sides
    differing: dict[str, dict[str, str]] = {}
    for where in dict.fromkeys((*before, *after)):
        if where in before and where in after:
            texts = _differences(before[where], after[where], what="it")
        else:
            run, held = ("candidate", after) if where in after else ("baseline", before)
            name = held[where].get("class")  # an optimizer's implementation has none: it was known later in one run
            texts = {"class": f"only the {run} has one ({_short(name)})"} if name else {}
        if texts:
            differing[where] = texts
    return differing


class Configurations:
    """Settings that differ between the two runs.

    Args:
        baseline: Contents of the baseline's `rank.json` files.
        candidate: The same of the candidate.
        rename: Turns the candidate's paths into the baseline's.
        ranks: The ranks of both runs' contents; numbered from 0 if left out.
    """

    def __init__(
        self,
        baseline: Sequence[Mapping[str, Any]],
        candidate: Sequence[Mapping[str, Any]],
        rename: Rename = str,
        *,
        ranks: Sequence[Sequence[int]] | None = None,
    ) -> None:
        before, after = _settings(baseline, str), _settings(candidate, rename)
        self._differing: dict[str, dict[str, str]] = {}
        for path in [path for path in before if path in after]:
            found = _differences(before[path], after[path], what="the module")
            if found:
                self._differing[path] = found
        for path, text in _untied(baseline, candidate, rename):
            self._differing.setdefault(path, {})["tied"] = text
        self._optimizers = _optimizers(baseline)
        self._around = _around(baseline, candidate)
        self._order = {path: place for place, path in enumerate(before)}
        self._modes = tuple({path: one.get("training") for path, one in side.items()} for side in (before, after))
        self._is_first, self._begins_elsewhere, self._ends_elsewhere = True, False, False
        self._evaluates: dict[str, tuple[str, int]] = {}  # by path: which run, and since when
        of_runs = ranks or (range(len(baseline)), range(len(candidate)))
        begins = (_modes_by_rank(baseline, of_runs[0], str), _modes_by_rank(candidate, of_runs[1], rename))
        for run, own, other in (("candidate", *begins[::-1]), ("baseline", *begins)):
            for path, evaluating in own.items():
                if path not in other and path in self._modes[0] and path in self._modes[1]:
                    self._evaluates[path] = (f"{run} on {ranks_text(evaluating, capital=False)}", 0)

    def see(self, tables: tuple[StepTable, StepTable], *, step: int) -> None:
        """Note which modules are in evaluation mode in one run only, before a step is judged."""
        changed = False
        for modes, table in zip(self._modes, tables, strict=True):
            for key, entry in table.items():
                if key.stage == MODE and not entry.unobserved:
                    modes[key.path] = str(bool(number(entry.summary)))
                    changed = True
        if not (changed or self._is_first):
            return
        self._is_first = False
        for path in [path for path in self._modes[0] if path in self._modes[1]]:
            before, after = (modes[path] for modes in self._modes)
            if before != after and None not in (before, after):
                self._evaluates.setdefault(path, ("candidate" if after == "False" else "baseline", step))

    def note_span(self, compared: Sequence[int], alone: Iterable[int]) -> None:
        """Leave out of the notes what a run tells of steps that were not compared: layers may be frozen there.

        Where gradients flow is known of a run's first steps, and what is frozen of its end.

        Args:
            compared: The steps of both runs, ascending.
            alone: The steps of one run alone.
        """
        alone = list(alone) if compared else []
        self._begins_elsewhere = bool(alone) and min(alone) < compared[0]
        self._ends_elsewhere = bool(alone) and max(alone) > compared[-1]

    def explained(self, finding: Finding, before: str = "") -> Finding:
        """The finding, with the settings of its module or parameter that differ; they come first in its message.

        Args:
            finding: A finding.
            before: The site before it in the order of execution; empty if it is not known.
        """
        is_held = (finding.phase, finding.slot) == ("param", "buffer") or finding.kind == "initial-parameter"
        if finding.phase not in ("forward", "loss", "backward", "grad", "optimizer", "update") and not is_held:
            return finding
        own, owner = finding.path, finding.path.rpartition(".")[0]
        consumers = _consumers(finding, before)
        cut = [one for one in consumers if _GRADIENT in self._differing.get(one, {})]
        known = self._differing.keys() | self._evaluates.keys()
        likely = (own, owner, *consumers[::-1])
        if finding.slot.startswith("output"):  # its gradient is what consumers hand back
            likely = (*consumers[::-1], own, owner)
        path = next((one for one in (*cut, *likely) if one in known), own)
        steps = self._optimizers.get(own, "")
        if finding.phase in ("optimizer", "update") and "type" in self._differing.get(steps, {}):
            path = steps  # another optimizer explains more than what differs in the parameter's module
        told = list(self._differing.get(path, {}).values())[:_MOST_NAMED]
        if path in self._evaluates and self._evaluates[path][1] <= finding.step:
            told.insert(0, self._evaluates_text(path))
        clause = f"{path or ROOT}: {'; '.join(told)}"
        if not told or clause in finding.evidence.get("surroundings", ()):
            return finding
        finding = finding if any(map(_SHORT.search, told)) else without_guess(finding)
        message = f"{clause}. {finding.message}"
        return replace(finding, message=message, evidence={**finding.evidence, "settings": told})

    def surrounded(self, first: Finding, unseen: Iterable[str] = ()) -> Finding:
        """The first finding, after what differs around the computation and may explain it.

        Args:
            first: The first finding.
            unseen: Modules of which what they return was not compared.
        """
        told = [
            f"{where}: {'; '.join(texts.values())}"
            for where, texts in self._around.items()
            if first.phase in _EXPLAINS.get(_what(where), ())
        ]
        told += self._modes_before_loss(first) + self._cut_before_gradient(first)
        if first.phase in ("loss", "backward", "grad"):
            differing = {path: self._differing[path] for path in unseen if path in self._differing}
            told += [f"{path or ROOT}: {'; '.join(texts.values())}" for path, texts in differing.items()]
        if not told:
            return first
        evidence = {**first.evidence, "surroundings": told}
        return replace(first, message=f"{'. '.join(told)}. {first.message}", evidence=evidence)

    def _modes_before_loss(self, first: Finding) -> list[str]:
        """Clauses on modules in another mode, if what was observed of the forward pass agrees and the loss does not.

        The loss may also depend on modules whose forward pass is not observed, such as a teacher without gradients.
        """
        if first.phase != "loss":
            return []
        return [
            f"{path or ROOT}: {self._evaluates_text(path)}"
            for path in _outermost(self._evaluates)
            if self._evaluates[path][1] <= first.step
        ]

    def _cut_before_gradient(self, first: Finding) -> list[str]:
        """Clauses on modules through which no gradient flows back to the parameter of the first divergence."""
        if first.phase != "grad" or self._differing.get(first.path):
            return []
        place = self._order.get(first.path.rpartition(".")[0], -1)
        behind = [path for path in self._differing if self._order.get(path, -1) > place]
        told = {path: text for path in behind if (text := self._differing[path].get(_GRADIENT, ""))}
        cut = _outermost(path for path, text in told.items() if text.startswith(_CUT))
        frozen = any(_FROZEN in texts for texts in self._differing.values())
        nearest = [] if frozen else sorted(told, key=lambda path: self._order[path])[:1]
        return [f"{path or ROOT}: {told[path]}" for path in cut or nearest]

    def _evaluates_text(self, path: str) -> str:
        run, step = self._evaluates[path]
        return f"it is in evaluation mode in the {run} from step {step} on (eval() was called)"

    def notes(self) -> list[str]:
        """One sentence that lists the settings that differ and are numbers or words of a module, or nothing."""
        listed = [f"{where}: {text}" for where, texts in self._around.items() for text in texts.values()]
        listed += [
            f"{path or ROOT}: {text}"
            for path in sorted(self._differing, key=lambda one: self._order.get(one, 0))
            for name, text in self._differing[path].items()
            if name not in _WITHOUT_EFFECT
            and not (name == _FROZEN and self._ends_elsewhere)
            and not (name == _GRADIENT and self._begins_elsewhere)
        ]
        listed += [f"{path or ROOT}: {self._evaluates_text(path)}" for path in _outermost(self._evaluates)]
        if not listed:
            return []
        more = more_text(len(listed) - _MOST_NAMED, "setting")
        return [f"Settings differ: {'; '.join(listed[:_MOST_NAMED])}{more}."]


def _consumers(finding: Finding, before: str) -> list[str]:
    """The modules that may have handed a wrong gradient back, outermost first.

    They are the module whose own gradient is the last one before it, and those around it.
    """
    before = before or str(finding.evidence.get("after") or "")
    if finding.phase != "backward" or not before:
        return []
    parts = before.rpartition(" ")[0].split(".")
    return [".".join(parts[: number + 1]) for number in range(len(parts))]


def _outermost(paths: Iterable[str]) -> list[str]:
    """The paths without those inside another one of them."""
    given = dict.fromkeys(paths)
    return [one for one in given if not any(_is_inside(one, other) for other in given)]


def _is_inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(f"{other}."))


def _optimizers(contents: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The name of the optimizer that holds each parameter."""
    held = (optimizer for content in contents for optimizer in content.get("optimizers", ()))
    return {path: one["name"] for one in held for group in one.get("groups", ()) for path in group}


def _modes_by_rank(
    contents: Iterable[Mapping[str, Any]], numbers: Iterable[int], rename: Rename
) -> dict[str, list[int]]:
    """The ranks on which a module begins in evaluation mode, if it begins in training mode on others."""
    ranks: dict[str, dict[str, list[int]]] = {}
    for content, rank in zip(contents, numbers, strict=True):
        for path, settings in content.get("module_settings", {}).items():
            modes = ranks.setdefault(rename(path), {})
            modes.setdefault(settings.get("training", ""), []).append(rank)
    return {path: modes["False"] for path, modes in ranks.items() if modes.keys() >= {"True", "False"}}


def _settings(contents: Iterable[Mapping[str, Any]], rename: Rename) -> dict[str, dict[str, str]]:
    """Settings by path, of modules, parameters and optimizers."""
    found: dict[str, dict[str, str]] = {}
    for content in contents:
        for path, settings in content.get("module_settings", {}).items():
            found.setdefault(rename(path), dict(settings))
        for path, word in content.get("gradient_paths", {}).items():
            found.setdefault(rename(path), {}).setdefault(_GRADIENT, word)
        for path, about in content.get("parameters", {}).items():
            if _FROZEN in about:
                found.setdefault(rename(path), {_FROZEN: str(about[_FROZEN])})
        for optimizer in content.get("optimizers", ()):
            found.setdefault(optimizer["name"], {"type": optimizer["type"]})
    return found


def _untied(
    baseline: Sequence[Mapping[str, Any]], candidate: Sequence[Mapping[str, Any]], rename: Rename
) -> Iterator[tuple[str, str]]:
    """Parameters that are one in one run, and two on a rank of the other: the first one's path, and a clause."""
    sides = (
        [(one.get("tied", {}), one.get("parameters", {}).keys()) for one in baseline],
        [
            (
                {rename(other): rename(path) for other, path in one.get("tied", {}).items()},
                {rename(path) for path in one.get("parameters", {})},
            )
            for one in candidate
        ],
    )
    for run, ranks, others in (("baseline", *sides), ("candidate", *sides[::-1])):
        for other, path in {pair: None for tied, _ in ranks for pair in tied.items()}:
            if any({path, other} <= held for _, held in others):
                apart = "candidate" if run == "baseline" else "baseline"
                text = f"it is also {other} in the {run} (tied), and {other} is a parameter of its own in the {apart}"
                yield path, text


def _differences(baseline: Mapping[str, str], candidate: Mapping[str, str], *, what: str) -> dict[str, str]:
    """A clause for each setting that differs, by its name; `what` is the subject of one about the class."""
    found = {}
    for name in dict.fromkeys((*baseline, *candidate)):
        if name == "training":
            continue  # which may change from step to step
        before, after = baseline.get(name), candidate.get(name)
        if name == _GRADIENT and None in (before, after):
            continue  # one run did not see the graph
        if before != after and not _are_of_one_script(before, after):
            found[name] = _clause(name, before, after, what)
    if "class" in found:  # which has other settings
        return {name: found[name] for name in ("class", "forward", _GRADIENT) if name in found}
    return found


_SCRIPTS = ("__main__.", "__mp_main__.")
"""What the names of a script's own classes begin with: in its first process, and in those that it starts."""


def _are_of_one_script(baseline: str | None, candidate: str | None) -> bool:
    """True for two names of one class or function: of a script that runs, is run by `spawn`, or is imported."""
    for own, other in ((baseline, candidate), (candidate, baseline)):
        for script in _SCRIPTS:
            if own and other and own.startswith(script) and other.endswith(f".{own.removeprefix(script)}"):
                return True
    return False


def _clause(name: str, before: str | None, after: str | None, what: str) -> str:
    if name == "class":
        return f"{what} is {_short(before)} in the baseline and {_short(after)} in the candidate"
    if name == _GRADIENT:
        run, word = ("baseline", before) if after == "through" else ("candidate", after)
        if word == "unneeded":
            return f"what it is given needs no gradient in the {run} (is it detached, or frozen, before?)"
        return f"{_CUT} in the {run} (is something detached inside?)"
    if name == "forward":
        if before is None or after is None:
            run, function = ("candidate", after) if before is None else ("baseline", before)
            return f"its forward was replaced in the {run}, by {function}"
        return f"its forward is {before} in the baseline and {after} in the candidate"
    if name == _FROZEN:
        return f"it is frozen in the {'candidate' if after == 'False' else 'baseline'} (requires_grad is False)"
    if before is None or after is None:
        run, value = ("candidate", after) if before is None else ("baseline", before)
        return f"{name} is set in the {run} only ({value})"
    return f"{name} is {before} in the baseline and {after} in the candidate"


def _short(name: str | None) -> str:
    """A class without its module, if that is torch's."""
    return "unknown" if name is None else name.rpartition(".")[2] if name.startswith("torch.") else name
