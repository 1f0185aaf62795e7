"""The table of a step: a row per gradient. UTF-8 with a byte order mark, CRLF, as msprobe 8.3 writes and reads it.

Names that a spreadsheet would compute have a single quote in front, which `load` takes away; others are as msprobe has
them.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from traindiff.core.setting_checks import interval_names
from traindiff.errors import NotARecordingError
from traindiff.present.data.as_csv import defused, restored
from traindiff.storage.schema import MOST_AXES, MOST_ELEMENTS

_INTERVAL = re.compile(r"\((-inf|[^,]+), ([^\])]+)[\])]")
_LENGTH = re.compile(r"\d{1,30}", re.ASCII)
_SHAPE = re.compile(r"\[\s*(\d{1,30}\s*(,\s*\d{1,30}\s*)*+,?\s*)?\]", re.ASCII)
_NUMBERS = ("max", "min", "norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns a table has beside those that every one has.

    Attributes:
        digest: Header of the column with a hash; empty without one.
        bounds: Of the intervals of which shares are given; None for a table without shares, also of zeros.
    """

    digest: str = ""
    bounds: tuple[float, ...] | None = None

    @property
    def header(self) -> list[str]:
        """All column names."""
        shares = [] if self.bounds is None else [*interval_names(self.bounds), "=0"]
        return ["param_name", *([self.digest] if self.digest else []), *shares, *_NUMBERS, "shape"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One gradient.

    Attributes:
        name: Name of the parameter.
        shape: Its shape.
        maximum: Largest element; NaN if one is NaN, or if there is none.
        minimum: Smallest element.
        norm: Euclidean norm.
        digest: Hash in the first column that is none of the others; empty without one.
        shares: Of the intervals, and at the end of zeros: of all elements. NaN is in no interval.
    """

    name: str
    shape: tuple[int, ...]
    maximum: float
    minimum: float
    norm: float
    digest: str = ""
    shares: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that was read: its columns and rows."""

    columns: Columns
    rows: tuple[Row, ...]


def dump(columns: Columns, rows: Iterable[Row]) -> bytes:
    """The content of a table's file."""
    lines: list[list[Any]] = [columns.header]
    for row in rows:
        digest = [row.digest] if columns.digest else []
        shares = row.shares if columns.bounds is not None else ()
        lines.append([defused(row.name), *digest, *shares, row.maximum, row.minimum, row.norm, list(row.shape)])
    return encoded(lines)


def encoded(lines: Iterable[Iterable[Any]]) -> bytes:
    """Comma-separated values as msprobe writes them."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(lines)
    return b"\xef\xbb\xbf" + text.getvalue().encode("utf-8", "surrogatepass")


def load(data: bytes, *, where: str) -> Table:
    """Read what `dump`, or msprobe, wrote.

    Raises:
        NotARecordingError: It is something else.
    """
    try:
        text = data.decode("utf-8-sig", "surrogatepass")
        lines = csv.reader(io.StringIO(text, newline=""))
        header = next(lines, [])
        names = [name.lower() for name in header]
        _check_complete(names)
        columns = Columns(digest=_digest(header), bounds=_bounds(header))
        rows = tuple(_row(names, header, line, columns) for line in lines if line)
        _check_once([row.name for row in rows], "row of")
        return Table(columns=columns, rows=rows)
    except (ValueError, IndexError, KeyError, csv.Error) as error:
        raise NotARecordingError(
            f"{where} is no table of gradients as msprobe's gradient monitor writes them: {error}. "
            "Give the directory that its dump_path named."
        ) from None


def _row(names: Sequence[str], header: Sequence[str], line: Sequence[str], columns: Columns) -> Row:
    if len(line) != len(header):
        raise ValueError(f"a row has {len(line)} cells under {len(header)} columns")
    cell = dict(zip(names, line, strict=True))
    maximum, minimum, norm = (float(cell[name]) for name in _NUMBERS)
    shares = [float(line[place]) for place, name in enumerate(header) if name == "=0" or _INTERVAL.fullmatch(name)]
    if norm < 0:
        raise ValueError(f"{norm} is no norm")
    if wrong := [share for share in shares if not 0 <= share <= 1]:
        raise ValueError(f"{wrong[0]} is no share of elements")
    return Row(
        name=restored(cell["param_name"]), shape=_shape(cell["shape"]), maximum=maximum, minimum=minimum,
        norm=norm, digest=cell[columns.digest.lower()] if columns.digest else "", shares=tuple(shares),
    )  # fmt: skip


def _shape(text: str) -> tuple[int, ...]:
    if not _SHAPE.fullmatch(text.strip()):
        raise ValueError(f"{text[:80]!r} is no shape")
    found = tuple(map(int, _LENGTH.findall(text)))
    if len(found) > MOST_AXES or math.prod(max(1, length) for length in found) > MOST_ELEMENTS:
        raise ValueError(f"{text[:80]!r} is the shape of more elements than there can be")
    return found


def _check_complete(names: Sequence[str]) -> None:
    if missing := [name for name in ("param_name", *_NUMBERS, "shape") if name not in names]:
        raise ValueError(f"it has no column {missing[0]}")
    _check_once(names, "column")


def _check_once(names: Sequence[str], of: str) -> None:
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise ValueError(f"it has more than one {of} {twice[0][:80]!r}")


def _digest(header: Sequence[str]) -> str:
    known = {"param_name", "=0", "shape", *_NUMBERS}
    other = [name for name in header if name.lower() not in known and not _INTERVAL.fullmatch(name)]
    if len(other) > 1:
        raise ValueError(f"nothing is known of a column {other[1]!r}")
    return other[0] if other else ""


def _bounds(header: Sequence[str]) -> tuple[float, ...] | None:
    ends = [match[2] for name in header if (match := _INTERVAL.fullmatch(name))]
    if not ends and "=0" not in header:
        return None
    bounds = tuple(float(end) if re.search(r"[.en]", end) else int(end) for end in ends[:-1])
    if not all(map(math.isfinite, bounds)) or any(after <= before for before, after in pairwise(bounds)):
        raise ValueError(f"the bounds of its intervals, {str(list(bounds))[:80]}, do not ascend")
    return bounds
