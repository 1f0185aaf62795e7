"""A result, sent to a web address when it is known."""

from __future__ import annotations

from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from traindiff.errors import ConfigError, Problem
from traindiff.present.data import json_text

_SECONDS = 30.0

_LONGEST = 200
"""Characters of an error that are shown."""


def check_webhook(url: str) -> None:
    """Refuse an address to which nothing can be sent.

    Raises:
        ConfigError: It is none of a web server.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets without an end, or a port that is no number
        is_address = False
    if not is_address or any(one.isspace() or not one.isprintable() for one in url):
        fix = "Write an address that begins with https:// or http://."
        raise ConfigError("--webhook", [Problem(where=url, what="is no address of a web server.", fix=fix)])


def send(url: str, *, text: str, result: dict[str, Any]) -> str:
    """Send a result as JSON: `text`, a sentence (which chat services show), and `result`, as `--json` prints it.

    Args:
        url: See `check_webhook`.
        text: The sentence.
        result: The result.

    Returns:
        Why it could not be sent; empty if it was.
    """
    body = json_text({"text": text, "result": result}).encode()
    request = Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_SECONDS):
            return ""
    except HTTPError as error:
        error.close()
        return " ".join(str(error).split())
    except (OSError, ValueError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        said = " ".join(str(reason).split())[:_LONGEST]
        return f"it answered with what is not HTTP ({said})" if isinstance(error, HTTPException) else said
