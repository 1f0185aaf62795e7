"""Sites at which the user ignores what a check finds: counted, and no findings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from traindiff.analyse.check.chosen_rules import CONSEQUENCE
from traindiff.analyse.findings import Finding, more_text
from traindiff.analyse.merge.site import StepTable
from traindiff.core.maps.accepted import Accepted, ignored_of, names_of
from traindiff.core.site import label


class IgnoredSites:
    """The globs of the user, with what they match.

    Args:
        ignore: Globs over sites: a path, or a path and a slot.

    Attributes:
        entries: The globs.
        found: Findings that are left out.

    Raises:
        ConfigError: A glob is not one.
    """

    def __init__(self, ignore: str | Iterable[str] | None) -> None:
        self.entries = ignored_of(ignore, asked_by="check(...)", consequence=CONSEQUENCE)
        self._sites: dict[Accepted, set[str]] = {entry: set() for entry in self.entries}
        self._found: dict[Accepted, dict[str, Finding]] = {entry: {} for entry in self.entries}

    @property
    def found(self) -> list[Finding]:
        """The findings that were left out so far."""
        return [one for found in self._found.values() for one in found.values()]

    @property
    def num_sites(self) -> int:
        """Number of sites with findings that were left out."""
        return len({label(one.path, one.slot) for one in self.found})

    def see(self, table: StepTable) -> None:
        """Note which sites of a step the globs name."""
        for entry in self.entries:
            named = (key for key in table if not key.stage and entry.names(names_of(key.path, key.slot)))
            self._sites[entry].update(label(key.path, key.slot) for key in named)

    def left(self, findings: Iterable[Finding]) -> Sequence[Finding]:
        """The findings that count. One about several parameters counts unless all of them are ignored."""
        left = []
        for finding in findings:
            paths = [str(path) for path in finding.evidence.get("paths", ())] or [finding.path]
            entries = [self._of(path, finding.slot) for path in paths]
            if entries[0] is None or None in entries:
                left.append(finding)
            else:
                where = f"{finding.kind} at {finding.phase} of {label(finding.path, finding.slot)}"
                self._found[entries[0]].setdefault(where, finding)
        return left

    def notes(self) -> Iterator[str]:
        """A sentence for each glob."""
        for entry in self.entries:
            found, matched = list(self._found[entry]), len(self._sites[entry])
            if not matched and not found:
                yield f'Warning: no site is named "{entry.name}", as --ignore says.'
                continue
            sites = "1 site" if matched == 1 else f"{matched} sites"
            what = f"{found[0]}{more_text(len(found) - 1, 'finding')}" if found else "nothing"
            yield f'Ignored, so not judged ("{entry.name}"): {sites}; found there: {what}.'

    def _of(self, path: str, slot: str) -> Accepted | None:
        return next((entry for entry in self.entries if entry.names(names_of(path, slot))), None)
