"""Write the page of one recording, or of two.

In a process of its own, so that a recording that takes forever, or crashes what reads it, costs this page only.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from urllib.parse import quote

from traindiff.comparison import compare
from traindiff.errors import TraindiffError
from traindiff.health import check
from traindiff.recording import open_recording
from traindiff.report.page import page_of, write
from traindiff.viewer.catalogue import Catalogue

NO_PAGE = 3
"""Exit code where standard output has, as JSON, the status of the answer and what it says."""

NO_SUCH_RECORDING = "There is no such recording under the directory."


def written(catalogue: Catalogue, names: Sequence[str]) -> str:
    """The page of one recording, or of the comparison of two.

    Args:
        catalogue: The directory.
        names: Of recordings, as they stand in an address.

    Raises:
        FileNotFoundError: There is no such recording.
        TraindiffError: A recording cannot be used.
    """
    paths = [str(path) for name in names if (path := catalogue.find(name)) is not None]
    if len(paths) < len(names):
        raise FileNotFoundError
    result = check(paths[0], history=True) if len(paths) == 1 else compare(paths[0], paths[1], history=True)
    endings = {one.status(rank).ending for one in map(open_recording, paths) for rank in one.ranks}
    asks = "&".join(f"of={quote(os.fsencode(name), safe='')}" for name in names)
    file = io.StringIO()
    write(page_of(result), file, home="/", refresh=f"/state?{asks}" if endings & {"unclosed", "truncated"} else "")
    return file.getvalue()


def main(root: str, names: Sequence[str]) -> int:
    """Write the page to standard output.

    Args:
        root: The directory.
        names: Of recordings, as they stand in an address.

    Returns:
        The exit code.
    """
    Thread(target=_end_with_parent, daemon=True).start()
    code = NO_PAGE
    try:
        text, code = written(Catalogue(Path(root)), names), 0
    except FileNotFoundError:
        text = _no_page(HTTPStatus.NOT_FOUND, NO_SUCH_RECORDING)
    except (TraindiffError, OSError) as error:
        text = _no_page(HTTPStatus.UNPROCESSABLE_ENTITY, str(error))
    except Exception as error:  # noqa: BLE001  whatever a damaged recording does, there is an answer
        says = f"This could not be read: {type(error).__name__}: {error}"
        text = _no_page(HTTPStatus.INTERNAL_SERVER_ERROR, says)
    sys.stdout.buffer.write(text.encode(errors="replace"))  # a name may be no UTF-8
    sys.stdout.buffer.flush()
    return code


def _no_page(status: HTTPStatus, says: str) -> str:
    return json.dumps({"status": status, "says": says})


def _end_with_parent() -> None:
    """End this process when the server does, which has the other end of standard input."""
    while os.read(0, 1):  # a buffered file could not be let go of at exit
        pass
    os._exit(1)
