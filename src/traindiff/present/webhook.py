"""A result, sent to a web address when it is known."""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from traindiff.errors import ConfigError, Problem

_SECONDS = 30.0


def check_webhook(url: str) -> None:
    """Refuse an address to which nothing can be sent.

    Raises:
        ConfigError: It is none of a web server.
    """
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
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
    body = json.dumps({"text": text, "result": result}).encode()
    request = Request(url, data=body, headers={"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_SECONDS):
            return ""
    except HTTPError as error:
        error.close()
        return " ".join(str(error).split())
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        return " ".join(str(reason).split())
