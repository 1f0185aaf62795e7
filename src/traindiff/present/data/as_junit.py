"""A verdict as JUnit XML, as continuous integration shows test results."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import IO
from xml.etree import ElementTree

from traindiff.analyse.check import Verdict
from traindiff.analyse.compare import Comparison, Verification, sentences
from traindiff.analyse.compare.verification import pinned_heading
from traindiff.analyse.findings import Finding, before_text, size_text, where_text
from traindiff.core.site import PHASES

_FAILED = frozenset({"diverged", "unhealthy"})
_UNKNOWN = frozenset({"misaligned", "incomplete"})
_CONTROL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML cannot hold, in any spelling."""


def write(result: Comparison | Verification | Verdict, file: IO[str]) -> None:
    """One test suite: a test case of the verdict, and one of each phase that was compared, or of each finding.

    A verdict that is `diverged` or `unhealthy` is a failure, one that is `misaligned` or `incomplete` an error, since
    it says nothing of the run.
    """
    comparison = result.comparison if isinstance(result, Verification) else result
    suite = ElementTree.Element("testsuite")
    if isinstance(comparison, Verdict):
        name = f"traindiff check {comparison.recording}"
        _case(suite, name, "verdict", _outcome(comparison.verdict), comparison.sentence(), str(comparison))
        for finding in comparison.findings:
            _case(suite, name, where_text(finding), "failure", finding.message, _says(finding))
    else:
        name = f"traindiff compare {comparison.baseline} {comparison.candidate}"
        sentence = sentences.verdict(comparison)
        _case(suite, name, "verdict", _outcome(result.verdict), sentence, str(result))
        compared = {row.phase for row in comparison.differences} | {one.phase for one in comparison.findings}
        for phase in (phase for phase in PHASES if phase in compared):
            _phase(suite, name, phase, [one for one in comparison.findings if one.phase == phase])
        if isinstance(result, Verification):
            for pinned in result.pinned:
                _phase(suite, name, f"pinned, {pinned.where}", pinned.comparison.findings, pinned_heading(pinned))
    suite.attrib = {"name": _text(name), "tests": str(len(suite)), **_counts(suite)}
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    file.write('<?xml version="1.0" encoding="utf-8"?>\n')
    file.write(ElementTree.tostring(suites, encoding="unicode") + "\n")


def _outcome(word: str) -> str:
    return "failure" if word in _FAILED else "error" if word in _UNKNOWN else ""


def _phase(suite: ElementTree.Element, name: str, phase: str, findings: Sequence[Finding], heading: str = "") -> None:
    if not findings:
        _case(suite, name, phase, "", "", "")
        return
    _case(suite, name, phase, "failure", heading or _message(findings), "\n\n".join(map(_says, findings)))


def _message(findings: Sequence[Finding]) -> str:
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return f"{where_text(findings[0])}: {findings[0].message}{more}"


def _says(finding: Finding) -> str:
    return "\n  ".join(filter(None, (where_text(finding), finding.message, size_text(finding), before_text(finding))))


def _case(suite: ElementTree.Element, name: str, case: str, how: str, message: str, text: str) -> None:
    one = ElementTree.SubElement(suite, "testcase", {"classname": _text(name), "name": _text(case)})
    if how:
        failed = ElementTree.SubElement(one, how, {"message": _text(message), "type": how})
        failed.text = _text(text)


def _counts(suite: Iterable[ElementTree.Element]) -> dict[str, str]:
    cases = list(suite)
    return {f"{how}s": str(sum(case.find(how) is not None for case in cases)) for how in ("failure", "error")}


def _text(text: str) -> str:
    return _CONTROL.sub("�", text)
