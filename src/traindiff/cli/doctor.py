"""`traindiff doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from traindiff.cli.app import app, messages, print_result, results, says_what_is_wrong
from traindiff.cli.options import RUNS, JsonOption

if TYPE_CHECKING:
    from traindiff.run.doctor.checks import Check

SCHEMA_NAME = "traindiff-doctor"
SCHEMA_VERSION = 1

_STYLES = {"pass": "green", "fail": "bold red", "skip": "yellow"}


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
        """True if no check failed."""
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
    from traindiff.present.text.layout import columns

    table = columns(left=("", "check", "what was found"))
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


@app.command(short_help="Check that recording changes nothing here.")
@says_what_is_wrong
def doctor(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="The training: FILE.py:FUNCTION or MODULE:FUNCTION that returns a traindiff.Training. A small model "
            "if left out.",
        ),
    ] = "",
    steps: Annotated[
        int,
        typer.Option(min=1, metavar="N", rich_help_panel=RUNS, help="Steps of each training whose bits are compared."),
    ] = 3,
    rounds: Annotated[
        int,
        typer.Option(min=0, metavar="N", rich_help_panel=RUNS, help="Pairs of steps that are timed; 0 times nothing."),
    ] = 9,
    compiled: Annotated[bool, typer.Option(rich_help_panel=RUNS, help="Also with torch.compile.")] = True,
    backend: Annotated[
        str, typer.Option(metavar="NAME", rich_help_panel=RUNS, help="Backend of torch.compile, e.g. inductor.")
    ] = "aot_eager",
    as_json: JsonOption = False,
) -> None:
    """Check on this machine that recording changes nothing and misses nothing, and what it costs.

    The training is run with and without a recording, eagerly and compiled, and compared bit by bit. Exits
    with 0 if no check failed, 1 if one did, and 2 if RECIPE cannot be used.
    """
    from traindiff.observe.torch.session.environment import describe
    from traindiff.run.doctor.checks import Plan, run_checks
    from traindiff.run.doctor.training import built_in, check_backend, try_out
    from traindiff.run.verify.recipe import load_recipe

    training = load_recipe(recipe, asked_by="doctor") if recipe else built_in
    try_out(training)
    check_backend(backend)
    plan = Plan(recipe=training, steps=steps, rounds=rounds, backend=backend if compiled else None)
    checks: list[Check] = []
    with messages.status("checking") as status:
        for check in run_checks(plan):
            checks.append(check)
            status.update(f"checking, after: {check.name}")
    about = describe()
    found = SelfTest(
        subject=recipe or "the built-in model",
        checks=tuple(checks),
        versions=about["versions"],
        environment=about["environment"],
    )
    print_result(found, "json" if as_json else "text", text=lambda: print_self_test(results, found))
    raise typer.Exit(0 if found.healthy else 1)
