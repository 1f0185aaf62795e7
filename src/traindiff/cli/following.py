"""How `check` and `compare` follow a run that goes on, and what is done with their verdict."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from traindiff.cli.app import messages
from traindiff.cli.given import refuse_here
from traindiff.cli.output_file import is_special
from traindiff.errors import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from traindiff.storage import Follower


def follower(
    context: typer.Context,
    wanted: bool,  # noqa: FBT001
    patience: float,
    webhook: str | None = None,
    junit: Path | None = None,
    alerts: Sequence[str] = (),
) -> Follower | None:
    """What waits for steps, if that is wanted.

    Raises:
        ConfigError: The verdict cannot be sent to the address, or written to the file; or the command line gives
            `--patience`, and nothing is followed.
    """
    from traindiff.storage import Follower

    if not wanted:
        refuse_here(
            context, ("patience",), what="is for a run that goes on, and there is no --follow.",
            fix="Add --follow, or leave it out.", consequence="nothing was read",
        )  # fmt: skip
    if webhook is not None:
        from traindiff.present.webhook import check_webhook

        check_webhook(webhook)
    if alerts:
        from traindiff.present.alerts import check_alert

        for alert in alerts:
            check_alert(alert)
    if junit is not None and (what := _cannot_be_written(junit)):
        fix = "Give the path of a file in a directory that is there, where you may write."
        raise ConfigError(
            "--junit", [Problem(where=f"--junit {junit}", what=what, fix=fix)], consequence="nothing was read"
        )
    return Follower(patience) if wanted else None


def _cannot_be_written(file: Path) -> str:
    """Why a file cannot be written, which is not changed by asking; empty if it can."""
    if not file.parent.is_dir():
        return "is in a directory that does not exist."
    if file.is_dir():
        return "is a directory."
    if is_special(file):
        return "is no regular file."
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        return "may not be written."
    return ""


def hand_on(result: Any, webhook: str | None, junit: Path | None, alerts: Sequence[str] = ()) -> None:
    """Write and send a verdict. That it could not be written or sent is said, and changes nothing."""
    if junit is not None:
        from traindiff.present.data import writer

        try:
            with junit.open("w", encoding="utf-8") as file:
                writer("junit")(result, file)
        except OSError as error:
            messages.print(f"traindiff: {junit} was not written: {error.strerror}", markup=False, soft_wrap=True)
    if webhook is not None:
        from traindiff.present.webhook import send

        if why := send(webhook, text=str(result).partition("\n")[0], result=result.to_json()):
            messages.print(f"traindiff: nothing was sent to {webhook}: {why}", markup=False, soft_wrap=True)
    if alerts:
        from traindiff.present.alerts import raise_alert

        for alert in alerts:
            if why := raise_alert(alert, result):
                messages.print(f"traindiff: no alert was raised with {alert}: {why}", markup=False, soft_wrap=True)
