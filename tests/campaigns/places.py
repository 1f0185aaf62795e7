"""Where the files of a mutant are while it is read, and how they get there.

WORK/under/training/baseline    the mutant: what a reader is given; `training` is a golden directory, `under` is viewed
WORK/under/clean                a recording that nobody has touched
WORK/clean/NAME                 the seeds
WORK/outside/secret             no reader may open it
WORK/output                     what readers write
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.campaigns.drafts import Special, Tree
from tests.campaigns.mutating import Seed
from tests.campaigns.seeds import Files


@dataclass(frozen=True, slots=True)
class Places:
    """Directories of one worker.

    Attributes:
        work: Holds all the others.
    """

    work: Path

    @property
    def under(self) -> Path:
        """What `traindiff view` is given."""
        return self.work / "under"

    @property
    def mutant(self) -> Path:
        """What readers are given."""
        return self.work / "under" / "training" / "baseline"

    @property
    def outside(self) -> Path:
        """What no reader may open."""
        return self.work / "outside"

    @property
    def output(self) -> Path:
        """Where readers write."""
        return self.work / "output"

    def clean(self, name: str) -> Path:
        """A seed as it is."""
        return self.work / "clean" / name

    def prepare(self, seeds: Sequence[Seed]) -> None:
        """Make everything but the mutant."""
        for seed in seeds:
            _write(self.clean(seed.name), seed.files)
            _write(self.outside, seed.files)
        _write(self.outside, {"secret": b"this is outside\n"})
        _write(self.under / "clean", next((seed.files for seed in seeds if seed.name == "plain"), {}))

    def put(self, tree: Tree) -> None:
        """Put a mutant in the place of the one before."""
        root = self.mutant
        _remove(root)
        _remove(self.output)
        self.output.mkdir(parents=True)
        root.mkdir(parents=True)
        _write(root, {path: content for path, content in tree.items() if isinstance(content, bytes)})
        for path, content in tree.items():
            if isinstance(content, Special):
                _put_special(root, path, content)


def _write(root: Path, files: Files) -> None:
    made: set[str] = set()
    for name, content in files.items():
        path = f"{root}/{name}"
        folder = os.path.dirname(path)  # noqa: PTH120  a million times
        try:
            if folder not in made:
                os.makedirs(folder, exist_ok=True)  # noqa: PTH103
                made.add(folder)
            with open(path, "wb") as file:  # noqa: PTH123
                file.write(content)
        except (OSError, ValueError):  # a name that no file can have
            continue


def _put_special(root: Path, name: str, special: Special) -> None:
    path = root / name
    try:
        if not path.parent.resolve().is_relative_to(root.resolve()):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(path)
        if special.kind == "fifo":
            os.mkfifo(path)
        elif special.kind == "directory":
            path.mkdir()
        elif special.kind == "link":
            path.symlink_to(special.target)
        elif special.kind == "socket":
            here = os.open(path.parent, os.O_RDONLY)
            try:
                with socket.socket(socket.AF_UNIX) as made:  # names of sockets are short
                    made.bind(f"/proc/self/fd/{here}/{path.name}")
            finally:
                os.close(here)
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, or there is no directory for it
        return


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path)
