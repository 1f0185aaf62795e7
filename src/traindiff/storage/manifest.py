"""`run.json` and `rank.json`: the description of a run, with a checksum and a format version."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from traindiff.core.settings import MOST_RANKS, SETTINGS
from traindiff.core.site import printable
from traindiff.core.untrusted.demands import (
    ANYTHING,
    FLAG,
    NUMBER,
    TEXT,
    Demand,
    demanded,
    listed,
    mapped,
    nullable,
    parse,
    shaped,
    whole,
)
from traindiff.errors import CorruptRecordingError, FormatVersionError, NotARecordingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a training ended, as its recorder wrote it when it closed the recording.

    Attributes:
        steps: Number of finished steps by optimizer name; empty if not known.
        error: The reason why it ended early, as a clause; empty if it did not, or if that is not known.
    """

    steps: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


def ended(content: Mapping[str, Any]) -> Ended:
    """The end of a rank from its `rank.json`; empty for a rank that was killed, or of another writer.

    Entries that make no sense are ignored.
    """
    said = content.get("ended")
    if not isinstance(said, dict):
        return Ended()
    counts, error = said.get("steps"), said.get("error")
    steps = {
        name: count
        for name, count in (counts.items() if isinstance(counts, dict) else ())
        if isinstance(count, int) and not isinstance(count, bool)
    }
    if not isinstance(error, dict) or not isinstance(error.get("step"), int):
        return Ended(steps=steps)
    return Ended(steps=steps, error=_says(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Steps for which a rank had no inputs, while others had; it took part in their collectives.

    Attributes:
        steps: Their numbers.
        divides_by_active: Gradients were divided by the number of ranks that had inputs, not by that of all ranks.
    """

    steps: range
    divides_by_active: bool = False


def joined(content: Mapping[str, Any]) -> list[Joined]:
    """The steps for which a rank had no inputs, from its `rank.json`."""
    return [
        Joined(
            steps=range(one["first"], one["first"] + one["steps"]),
            divides_by_active=bool(one.get("divides_by_active")),
        )
        for one in content.get("joined", ())
    ]


def _says(error: Mapping[str, Any]) -> str:
    step, kind, message = error.get("step"), error.get("type"), error.get("message")
    if not kind:
        return f"the program ended in the middle of step {step}"
    return f"the training was ended by {kind} in step {step}" + (f": {message}" if message else "")


_COUNT = whole(0)

_MESH = nullable(
    shaped(
        {},
        {
            "data_parallel": whole(1, MOST_RANKS),
            "engine": nullable(TEXT),
            "pipeline": whole(1, MOST_RANKS),
            "schedule": TEXT,
            "micro_batches": nullable(_COUNT),
            "scales_gradients": nullable(FLAG),
            "gradient_divisor": NUMBER,
        },
    )
)

RUN: Demand = shaped(
    {
        "format": TEXT,
        "version": whole(1),
        "world_size": whole(1, MOST_RANKS),
        "settings": shaped(
            {},
            {name: setting.in_json for name, setting in SETTINGS.items() if setting.in_json is not None},
        ),
    },
    {
        "mesh": _MESH,
        "engine": nullable(
            shaped(
                {},
                {
                    "name": nullable(TEXT),
                    "zero_stage": nullable(NUMBER),
                    "gradient_clipping": nullable(NUMBER),
                    "optimizer": nullable(TEXT),
                    "decoupled_weight_decay": nullable(FLAG),
                    "asked_for": nullable(TEXT),
                },
            )
        ),
        "forced_by": nullable(TEXT),
        "first_step": nullable(_COUNT),
        "compact": shaped({"endings": nullable(mapped(shaped({"ending": TEXT, "message": TEXT})))}),
        "recipe": nullable(TEXT),
        "created": TEXT,
        "command": listed(TEXT),
        "versions": mapped(nullable(TEXT)),
        "environment": shaped({}, {"framework": TEXT}),
        "source": mapped(ANYTHING),
    },
)
"""Keys and types of a `run.json` of the current version."""

_TENSORS = mapped(
    shaped(
        {},
        {
            "shape": listed(_COUNT),
            "dtype": TEXT,
            "requires_grad": FLAG,
            "not_reduced": FLAG,
            "reduced_in": TEXT,
        },
    )
)

_FORM: dict[str, Demand] = {"format": TEXT, "terms": _COUNT}

_CALLED = shaped(
    {},
    {
        "source": nullable(
            shaped({}, {"file": TEXT, "line": nullable(_COUNT), "function": TEXT, "code": TEXT}),
        ),
        "settings": mapped(TEXT),
        "node": nullable(TEXT),
        "of": nullable(TEXT),
        "products": mapped(shaped(_FORM, {"others": listed(shaped(_FORM))})),
    },
)

RANK: Demand = shaped(
    {},
    {
        "rank": whole(0, MOST_RANKS - 1),
        "model": TEXT,
        "modules": mapped(TEXT),
        "holders": listed(TEXT),
        "module_settings": mapped(mapped(TEXT)),
        "surroundings": mapped(mapped(TEXT)),
        "gradient_paths": mapped(TEXT),
        "parameters": _TENSORS,
        "buffers": _TENSORS,
        "tied": mapped(TEXT),
        "optimizers": listed(
            shaped(
                {"name": TEXT, "type": TEXT, "groups": listed(listed(TEXT))},
                {"counts_in_float32": FLAG, "settings_in_float32": FLAG, "own_step": FLAG},
            )
        ),
        "world_size": whole(1, MOST_RANKS),
        "mesh": _MESH,
        "pid": _COUNT,
        "pipeline": shaped(
            {
                "num_stages": whole(1, MOST_RANKS),
                "stages": listed(whole(0, MOST_RANKS - 1), least=1),
                "ranks": listed(whole(0, MOST_RANKS - 1)),
            }
        ),
        "operators": mapped(mapped(_CALLED)),
        "products": mapped(mapped(_CALLED)),
        "not_forced": mapped(TEXT),
        "not_followed": listed(TEXT),
        "joined": listed(shaped({"first": _COUNT, "steps": _COUNT}, {"divides_by_active": FLAG})),
    },
)
"""Keys and types of a `rank.json`."""


FORMAT_NAME = "traindiff-recording"
FORMAT_VERSION = 1

Manifest = dict[str, Any]

MIGRATIONS: Mapping[int, Callable[[Manifest], Manifest]] = {}
"""By version: a pure function that turns a `run.json` of that version into one of the next version."""


def dump(manifest: Mapping[str, Any]) -> bytes:
    """The manifest as JSON, including the checksum of its canonical form."""
    return json.dumps(
        {**manifest, "checksum": _checksum(manifest)}, indent=2, ensure_ascii=False, sort_keys=True
    ).encode()


def load(data: bytes, *, where: str) -> Manifest:
    """Parse what `dump` wrote.

    Raises:
        CorruptRecordingError: It is not JSON, would cost too much to parse, or its checksum does not fit.
    """
    return _checked(demanded(parse(data, where=where), shaped({}), where=where), where)


def load_rank(data: bytes, *, where: str, like: Mapping[str, Any] = MappingProxyType({})) -> Manifest:
    """Parse a `rank.json`.

    Args:
        data: Its bytes.
        where: The file, for messages.
        like: What this returned for another rank. Values that are equal are not looked at again.

    Raises:
        CorruptRecordingError: The file is damaged (see `load`), or does not meet the demand `RANK`.
    """
    content = load(data, where=where)
    others = {name: value for name, value in content.items() if not (name in like and like[name] == value)}
    demanded(others, RANK, where=where)
    return content


def _checked(manifest: Manifest, where: str) -> Manifest:
    """The manifest without its checksum, after checking it."""
    found = manifest.pop("checksum", None)
    expected = _checksum(manifest)
    if found != expected:
        raise CorruptRecordingError(
            f"{where} is damaged: its checksum is {found}, its content gives {expected}. "
            "Restore the file from where it was copied; it must not be edited."
        )
    return manifest


def load_run(data: bytes, *, where: str) -> Manifest:
    """Parse a `run.json` and bring it to `FORMAT_VERSION`.

    Raises:
        NotARecordingError: It is the JSON of something else.
        FormatVersionError: Its format is newer than this traindiff reads.
        CorruptRecordingError: The file is damaged (see `load`), or does not meet the demand `RUN`.
    """
    found: Manifest = demanded(parse(data, where=where), shaped({}), where=where)
    if found and found.get("format") != FORMAT_NAME and "checksum" not in found:
        raise _another_format(found, where)
    version = found.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        # Before the checksum, which a newer version may compute differently.
        raise FormatVersionError(
            f"{where} has format version {version}; this traindiff reads versions up to {FORMAT_VERSION}. "
            "Update it with: pip install --upgrade traindiff"
        )
    manifest = _checked(found, where)
    if manifest.get("format") != FORMAT_NAME:
        raise _another_format(manifest, where)
    demanded(manifest, shaped({"version": whole(1)}), where=where)
    while (version := manifest["version"]) < FORMAT_VERSION:
        manifest = MIGRATIONS[version](manifest)
    demanded(manifest, RUN, where=where)
    return manifest


def readable(content: Any) -> Any:
    """A copy of a manifest, or of a value in it, whose texts and keys are all `printable`."""
    if isinstance(content, str):
        return printable(content)
    if isinstance(content, list):
        return [readable(one) for one in content]
    if isinstance(content, dict):
        return {printable(key): readable(value) for key, value in content.items()}
    return content


def framework(run: Mapping[str, Any]) -> tuple[str, str]:
    """Name and version of the framework that a run was trained with, from its `run.json`."""
    name = run.get("environment", {}).get("framework", "torch")
    return name, str(run.get("versions", {}).get(name, "unknown"))


def _another_format(manifest: Manifest, where: str) -> NotARecordingError:
    found = printable(repr(manifest.get("format"))[:80])
    return NotARecordingError(
        f'{where} is not of a recording: "format" is {found}, not "{FORMAT_NAME}". '
        "Give the directory that traindiff.record(...) wrote."
    )


def _checksum(manifest: Mapping[str, Any]) -> str:
    canonical = json.dumps(manifest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return f"crc32:{zlib.crc32(canonical.encode(errors='surrogatepass')):08x}"
