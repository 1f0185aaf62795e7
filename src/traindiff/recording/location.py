"""Where a recording is: a local path or any fsspec URL."""

from __future__ import annotations

from typing import Any

import fsspec

from traindiff.errors import ConfigError, Problem


def file_system(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path in it.

    Raises:
        ConfigError: The protocol is not known, or needs a package that is not installed; or the path is relative to
            a working directory that is gone.
    """
    try:
        file_system, root = fsspec.core.url_to_fs(path)
    except ImportError as error:
        fix = "Install that package where traindiff is installed."
        raise _unreachable(path, f"cannot be reached: {error}.", fix) from None
    except OSError as error:  # the working directory was deleted
        fix = "Write an absolute path, or change to a directory that is there."
        raise _unreachable(path, f"cannot be reached: {error.strerror or error}.", fix) from None
    except ValueError as error:
        fix = f"Write a local path, or a URL of one of: {', '.join(sorted(fsspec.available_protocols())[:12])}, ..."
        raise _unreachable(path, f"cannot be reached: {error}.", fix) from None
    return file_system, root


def _unreachable(path: str, what: str, fix: str) -> ConfigError:
    return ConfigError("the path of a recording", [Problem(where=repr(path), what=what, fix=fix)])
