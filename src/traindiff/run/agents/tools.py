"""The tools of `traindiff mcp`: functions from plain arguments to JSON values, confined to a directory."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from traindiff.analyse.check import check
from traindiff.analyse.compare import compare
from traindiff.errors import ConfigError, Problem
from traindiff.present.data import json_text, observations
from traindiff.present.glossary import explain_all, explained
from traindiff.present.viewer.catalog import Catalog
from traindiff.storage import open_recording

ROWS = 20
"""Entries of each list, unless more are asked for."""

_SECONDS = 1800.0
"""Time for an investigation."""


class Tools:
    """What the server can do. Nothing is written below the directory, and nothing outside it is read.

    Args:
        root: The directory of the recordings.
        may_run: Whether `investigate` may run trainings: code below the directory, which can do anything.
    """

    def __init__(self, root: Path, *, may_run: bool = False) -> None:
        self._catalog = Catalog(root)
        self._may_run = may_run

    def all(self) -> list[Callable[..., dict[str, Any]]]:
        """The tools. Their names, arguments and docstrings are what an agent reads."""
        return [self.recordings, self.compare, self.check, self.show, self.explain, self.investigate]

    def recordings(self, after: int = 0) -> dict[str, Any]:
        """List the recordings that the other tools accept, the latest first. `has_more` says whether there are more.

        Args:
            after: Number of recordings to leave out, to list those behind them.
        """
        found = self._catalog.recordings(max(0, after))
        return {
            "recordings": [
                {"name": one.name, "created": one.created, "ranks": one.ranks, "ending": one.ending} for one in found
            ],
            "has_more": self._catalog.has_more,
        }

    def compare(
        self, baseline: str, candidate: str, noise: Sequence[str] = (), steps: str | None = None, rows: int = ROWS
    ) -> dict[str, Any]:
        """Compare two recordings: the verdict, the first divergence, and what follows from it.

        Args:
            baseline: The recording that is trusted, by its name in `recordings`.
            candidate: The recording in question.
            noise: Recordings of replicas of the baseline, which measure its noise floors.
            steps: Steps to compare, e.g. "0-9,20,30-". All, if left out.
            rows: Entries of each list at most; `left_out` counts the others.
        """
        paths = [self._path(name, "compare") for name in (baseline, candidate, *noise)]
        result = compare(paths[0], paths[1], noise=paths[2:], steps=steps)
        return self._named(shortened(result.to_json(), rows))

    def check(self, recording: str, steps: str | None = None, rows: int = ROWS) -> dict[str, Any]:
        """Check one recording by itself: whether it breaks a rule that a healthy training keeps.

        Args:
            recording: The recording, by its name in `recordings`.
            steps: Steps to check, e.g. "0-9,20,30-". All, if left out.
            rows: Entries of each list at most; `left_out` counts the others.
        """
        return self._named(shortened(check(self._path(recording, "check"), steps=steps).to_json(), rows))

    def show(
        self, recording: str, site: str = "*", phase: str | None = None, steps: str | None = None, rows: int = ROWS
    ) -> dict[str, Any]:
        """Show the numbers of tensors: norm, mean, extremes, counts of NaN and infinities.

        Args:
            recording: The recording, by its name in `recordings`.
            site: Glob over sites: a path, e.g. "transformer.h.3.*", or a path and a slot.
            phase: One of batch, forward, loss, backward, grad, optimizer, update, param. All, if left out.
            steps: Steps to show, e.g. "0-9,20,30-". All, if left out.
            rows: Observations at most; `left_out` says whether there are more.
        """
        wanted = observations.parse_filter(
            site, (phase,) if phase else (), steps, asked_by="show", consequence="nothing was shown"
        )
        found = open_recording(self._path(recording, "show"))
        some = list(islice(observations.rows(found, wanted), rows + 1))
        text = io.StringIO()
        observations.write_json(iter(some[:rows]), text, recording=found)
        return self._named({**json.loads(text.getvalue()), "left_out": {"observations": len(some) > rows}})

    def explain(self, name: str) -> dict[str, Any]:
        """Explain a term, a kind of finding or a rule; or give a page of the documentation, e.g. agents.

        Args:
            name: The name, e.g. "noise floor", "lost-contribution", "rules.md".
        """
        answer = explained(name, explain_all(name.split()))
        del answer["known"]
        return answer

    def investigate(
        self, recipe: str, candidate: str | None = None, steps: int = 4, rows: int = ROWS
    ) -> dict[str, Any]:
        """Run two trainings and find the operation that makes them differ. It runs their code, and takes minutes.

        Args:
            recipe: The trusted training: FILE.py:FUNCTION below the directory; the function returns a
                traindiff.Training.
            candidate: The training in question. The same as `recipe`, if left out.
            steps: Batches to train on.
            rows: Entries of each list at most; `left_out` counts the others.
        """
        recipes = [self._recipe(one) for one in (recipe, candidate or recipe)]
        if not self._may_run:
            command = f"traindiff investigate {recipe} --candidate {candidate or recipe} --steps {steps}"
            problem = Problem(
                where="investigate",
                what="runs code, which this server was not allowed to do.",
                fix=f"Run it yourself: {command}. Or start the server with traindiff mcp --run.",
            )
            raise ConfigError("investigate", [problem], consequence="nothing was run")
        with TemporaryDirectory(prefix="traindiff-mcp-") as output:
            words = (
                "investigate",
                recipes[0],
                "--candidate",
                recipes[1],
                "--steps",
                str(steps),
                "-o",
                output,
                "--json",
            )
            done = subprocess.run(
                [sys.executable, "-m", "traindiff", *words], cwd=self._catalog.root, check=False, text=True,
                stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS,
            )  # fmt: skip
            written = Path(output, "investigation.json")
            if not written.exists():
                problem = Problem(
                    where="investigate",
                    what=f"ended with exit code {done.returncode}.",
                    fix="Read what it said, and change the recipe.",
                    more=tuple(done.stderr.splitlines()[-20:]),
                )
                raise ConfigError("investigate", [problem], consequence="there is no result")
            result = json.loads(written.read_text(encoding="utf-8"))
        result["next"] = []  # its recordings are gone
        return shortened(result, rows)

    def _path(self, name: str, asked_by: str) -> str:
        """The path of a recording below the directory.

        Raises:
            ConfigError: The name leads out of the directory, or there is no recording.
        """
        inside = "://" not in name and not Path(name).is_absolute()
        path = self._catalog.find(name) if inside else None
        if path is None:
            known = [one.name for one in self._catalog.recordings()]
            problem = Problem.unknown_name(where=name, kind="a recording of this server", found=name, known=known)
            raise ConfigError(asked_by, [problem], consequence="nothing was read")
        return str(path)

    def _recipe(self, recipe: str) -> str:
        """A recipe of a file below the directory.

        Raises:
            ConfigError: It is of no such file.
        """
        name, _, function = recipe.rpartition(":")
        root = self._catalog.root
        path = Path(os.path.realpath(root / name)) if name and "\0" not in name else root
        if not (path.is_relative_to(root) and path.suffix == ".py" and path.is_file() and function.isidentifier()):
            problem = Problem(
                where=recipe,
                what="is no recipe of a file below the directory of this server.",
                fix="Write FILE.py:FUNCTION, with the path of the file below that directory.",
            )
            raise ConfigError("investigate", [problem], consequence="nothing was run")
        return f"{path}:{function}"

    def _named(self, result: dict[str, Any]) -> dict[str, Any]:
        """A result with the names of recordings in place of their paths."""
        found: dict[str, Any] = json.loads(json_text(result).replace(json.dumps(f"{self._catalog.root}/")[1:-1], ""))
        return found


def shortened(result: dict[str, Any], rows: int) -> dict[str, Any]:
    """A JSON result whose lists have at most so many entries, and how many were left out of each, by name."""
    left_out: dict[str, int] = {}

    def short(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: short(one, f"{name}.{key}" if name else key) for key, one in value.items()}
        if isinstance(value, list) and len(value) > rows:
            left_out[name] = len(value) - rows
            return value[:rows]
        return value

    return {**short(result, ""), "left_out": left_out}
