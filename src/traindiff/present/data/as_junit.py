"""A result as JUnit XML, the format in which continuous integration shows test results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import IO
from xml.etree import ElementTree

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, Verification
from traindiff.analyse.compare.investigation import IMPOSSIBLE, Matrix
from traindiff.analyse.findings import Finding, sizes_of, where_text
from traindiff.analyse.story import story_of
from traindiff.core.site import PHASES

_FAILED = frozenset({"diverged", "unhealthy"})
_PASSED = frozenset({"identical", "equivalent", "healthy"})
_CONTROL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, in any spelling."""


def write(result: Comparison | Verification | Verdict | Matrix, file: IO[str]) -> None:
    """One test suite: a test case of the verdict, and one of each phase that was compared, or of each finding.

    A verdict that is `diverged` or `unhealthy` is a failure, and any other that does not pass an error, since it says
    nothing of the run. Of a matrix, each combination is a test case; one that is impossible here is skipped.
    """
    if isinstance(result, Matrix):
        suite = _of_matrix(result)
    elif isinstance(result, Verdict):
        suite = _of_check(result)
    else:
        suite = _of_comparison(result)
    suites = ElementTree.Element("testsuites")
    suites.append(suite.finished())
    ElementTree.indent(suites)
    file.write('<?xml version="1.0" encoding="utf-8"?>\n')
    file.write(ElementTree.tostring(suites, encoding="unicode") + "\n")


class _Suite:
    """A test suite, to which cases are added one by one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._suite = ElementTree.Element("testsuite")

    def case(self, name: str, *, outcome: str = "", message: str = "", text: str = "", said: str = "") -> None:
        """Add a case, which passes where it has no outcome; `said` is its output."""
        one = ElementTree.SubElement(self._suite, "testcase", {"classname": _text(self._name), "name": _text(name)})
        if outcome:
            about = ElementTree.SubElement(one, outcome, {"message": _text(message), "type": outcome})
            about.text = _text(text)
        if said:
            ElementTree.SubElement(one, "system-out").text = _text(said)

    def findings(self, name: str, findings: Sequence[Finding], *, heading: str = "") -> None:
        """Add a case that fails where there are findings."""
        if not findings:
            self.case(name)
            return
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        message = heading or f"{where_text(findings[0])}: {findings[0].said}{more}"
        self.case(name, outcome="failure", message=message, text="\n\n".join(map(_in_full, findings)))

    def finished(self) -> ElementTree.Element:
        """The suite, with its name and its counts."""
        cases = list(self._suite)
        outcomes = {"failures": "failure", "errors": "error"} | (
            {"skipped": "skipped"} if any(case.find("skipped") is not None for case in cases) else {}
        )
        counts = {name: str(sum(case.find(how) is not None for case in cases)) for name, how in outcomes.items()}
        self._suite.attrib = {"name": _text(self._name), "tests": str(len(cases)), **counts}
        return self._suite


def _of_check(verdict: Verdict) -> _Suite:
    suite = _Suite(f"traindiff check {verdict.recording}")
    suite.case("verdict", outcome=_outcome(verdict.verdict), message=verdict.sentence(), text=str(verdict))
    for finding in verdict.findings:
        suite.case(where_text(finding), outcome="failure", message=finding.said, text=_in_full(finding))
    return suite


def _of_comparison(result: Comparison | Verification) -> _Suite:
    comparison, story = result.comparison if isinstance(result, Verification) else result, story_of(result)
    suite = _Suite(f"traindiff compare {comparison.baseline} {comparison.candidate}")
    said = "\n".join(filter(None, (story.bits, story.counts)))
    suite.case("verdict", outcome=_outcome(story.word), message=story.sentence, text=str(story), said=said)
    compared = {row.phase for row in comparison.differences} | {one.phase for one in comparison.findings}
    for phase in (phase for phase in PHASES if phase in compared):
        suite.findings(phase, [one for one in comparison.findings if one.phase == phase])
    for pinned in story.pinned:
        suite.findings(f"pinned, {pinned.where}", pinned.findings, heading=pinned.heading)
    return suite


def _of_matrix(matrix: Matrix) -> _Suite:
    suite = _Suite(f"traindiff verify {matrix.recipe}")
    for row in matrix.rows:
        outcome = "skipped" if row.verdict == IMPOSSIBLE else _outcome(row.verdict)
        suite.case(row.name, outcome=outcome, message=f"{row.verdict}: {row.message}", text=f"Report: {row.output}")
    return suite


def _outcome(word: str) -> str:
    return "" if word in _PASSED else "failure" if word in _FAILED else "error"


def _in_full(finding: Finding) -> str:
    return "\n  ".join((where_text(finding), finding.said, *sizes_of(finding)))


def _text(text: str) -> str:
    return _CONTROL.sub("�", text)
