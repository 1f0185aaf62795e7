"""The self-test in the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from traindiff.report.terminal import columns

SCHEMA_NAME = "traindiff-doctor"
SCHEMA_VERSION = 1

_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


class Check(Protocol):
    """See `traindiff.sessions.doctor.checks.Check`."""

    @property
    def name(self) -> str:
        """What was checked."""

    @property
    def result(self) -> str:
        """`pass`, `fail` or `skip`."""

    @property
    def says(self) -> str:
        """A sentence."""

    @property
    def evidence(self) -> dict[str, Any]:
        """Numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All checks of one subject, and where they ran."""

    subject: str
    checks: tuple[Check, ...]
    versions: Mapping[str, str]
    environment: Mapping[str, Any]

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return all(check.result != "fail" for check in self.checks)


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """Print the checks as a table, and where they ran."""
    table = columns(left=("", "check", "what was found"), right=())
    for check in diagnosis.checks:
        table.add_row(Text(check.result, style=_STYLES[check.result]), Text(check.name), Text(check.says))
    versions = ", ".join(f"{name} {version}" for name, version in diagnosis.versions.items())
    console.print(Text(f"{diagnosis.subject} on {diagnosis.environment['platform']}", style="bold"), soft_wrap=True)
    console.print(Text(versions, style="dim"), soft_wrap=True)
    console.print()
    console.print(table)
    failed = sum(check.result == "fail" for check in diagnosis.checks)
    console.print()
    if failed:
        console.print(Text(f"{failed} of {len(diagnosis.checks)} checks failed.", style="bold red"))
    else:
        console.print(Text("No check failed.", style="bold green"))


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis in the schema of docs/json.md."""
    return {
        "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
        "subject": diagnosis.subject,
        "verdict": "healthy" if diagnosis.healthy else "unhealthy",
        "checks": _checks(diagnosis.checks),
        "versions": dict(diagnosis.versions),
        "environment": dict(diagnosis.environment),
    }


def _checks(checks: Iterable[Check]) -> list[dict[str, Any]]:
    return [
        {"name": check.name, "result": check.result, "says": check.says, "evidence": check.evidence} for check in checks
    ]
