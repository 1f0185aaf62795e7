"""The self-test in the terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from traindiff.present.text.results import columns

SCHEMA_NAME = "traindiff-doctor"
SCHEMA_VERSION = 1

_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


class Check(Protocol):
    """See `traindiff.run.doctor.checks.Check`."""

    @property
    def name(self) -> str:
        """What was checked."""

    @property
    def result(self) -> str:
        """`pass`, `fail` or `skip`."""

    @property
    def message(self) -> str:
        """A sentence."""

    @property
    def evidence(self) -> dict[str, Any]:
        """Numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """All checks of one subject, and where they ran.

    Attributes:
        subject: The training on which the checks were made.
        checks: In the order in which they were made.
        versions: Version by package.
        environment: As in `run.json`.
    """

    subject: str
    checks: tuple[Check, ...]
    versions: Mapping[str, str]
    environment: Mapping[str, Any]

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return all(check.result != "fail" for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The result in the schema of `--json`, as JSON values."""
        return {
            "schema": {"name": SCHEMA_NAME, "version": SCHEMA_VERSION},
            "subject": self.subject,
            "verdict": "healthy" if self.healthy else "unhealthy",
            "checks": [
                {"name": check.name, "result": check.result, "message": check.message, "evidence": check.evidence}
                for check in self.checks
            ],
            "versions": dict(self.versions),
            "environment": dict(self.environment),
        }


def print_self_test(console: Console, found: SelfTest) -> None:
    """Print the checks as a table, and where they ran."""
    table = columns(left=("", "check", "what was found"), right=())
    for check in found.checks:
        table.add_row(Text(check.result, style=_STYLES[check.result]), Text(check.name), Text(check.message))
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    console.print(Text(f"{found.subject} on {found.environment['platform']}", style="bold"), soft_wrap=True)
    console.print(Text(versions, style="dim"), soft_wrap=True)
    console.print()
    console.print(table)
    failed = sum(check.result == "fail" for check in found.checks)
    console.print()
    if failed:
        console.print(Text(f"{failed} of {len(found.checks)} checks failed.", style="bold red"))
    else:
        console.print(Text("No check failed.", style="bold green"))
