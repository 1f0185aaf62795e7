"""FORMAT.md says what the code does: columns, fields, keys, words and constants."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from traindiff.core import observation, site
from traindiff.core.kernels import element_details as elementwise
from traindiff.core.kernels import reference as hashing
from traindiff.core.setting_checks import SAMPLE_ORDERS
from traindiff.core.shards import BUCKETS
from traindiff.core.summary import SKETCH_SIZE, SUMMARY
from traindiff.storage import manifest
from traindiff.storage.schema import SCHEMA
from traindiff.storage.writer import seal

FORMAT = (Path(manifest.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table after a text, without the head."""
    _, _, text = FORMAT.partition(heading)
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[0].splitlines()[2:]]


def named(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def paragraph(begin: str) -> str:
    (found,) = re.findall(rf"^{re.escape(begin)}(?:.+\n)+", FORMAT, re.MULTILINE)
    return str(found)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> traindiff.Recording:
    path = tmp_path_factory.mktemp("format") / "run"
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with traindiff.record(path, model, optimizer):
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    return traindiff.open_recording(str(path))


def test_the_version_is_that_of_the_code() -> None:
    assert FORMAT.startswith(f"# The recording format, version {manifest.FORMAT_VERSION}\n")
    assert f'| `format` | `"{manifest.FORMAT_NAME}"` |' in FORMAT
    assert f"this document is version {manifest.FORMAT_VERSION} |" in FORMAT


def test_the_columns_are_those_of_the_schema_with_their_types() -> None:
    types = {"string": "utf8", "double": "float64", "list<item: int64>": "list<int64>"}
    written = [
        (name, types.get(str(SCHEMA.field(name).type), str(SCHEMA.field(name).type)))
        for name in SCHEMA.names
        if name not in (SUMMARY.names or ())
    ]
    documented = [(named(name)[0], kind) for name, kind, _ in rows("\n## Columns") if named(name)]

    assert documented == written
    assert not any(field.nullable for field in SCHEMA)


def test_the_fields_of_the_summary_are_those_of_the_code_with_their_types() -> None:
    documented = {name: kind for names, kind, *_ in rows("\n## The summary") for name in named(names)}
    assert documented == {name: _type(SUMMARY[name]) for name in SUMMARY.names or ()}


def _type(dtype: np.dtype[Any]) -> str:
    return f"{dtype.base.name}[{dtype.shape[0]}]" if dtype.shape else dtype.name


def test_the_fields_merge_as_the_document_says() -> None:
    from traindiff.core import summary

    functions: Mapping[str, tuple[str, ...]] = {
        "sum": (*summary._COUNTS, *summary._FINGERPRINTS, *summary._SUMS),
        "min": summary.MINIMA,
        "max": summary.MAXIMA,
    }
    for names, _, _, merges in rows("\n## The summary"):
        words = merges.split(", ") if ", " in merges else [merges] * len(named(names))
        for name, word in zip(named(names), words, strict=True):
            assert name in functions[word]


def test_the_keys_of_run_json_are_those_of_the_document(recording: traindiff.Recording) -> None:
    assert {named(key)[0] for key, _ in rows("\n`run.json`:")} == recording.run.keys()


def test_the_settings_in_run_json_are_those_of_the_document(recording: traindiff.Recording) -> None:
    (settings,) = (value for key, value in rows("\n`run.json`:") if key == "`settings`")

    assert recording.run["settings"].keys() <= set(named(settings))
    assert set(SAMPLE_ORDERS) <= set(named(settings))


def test_the_keys_of_rank_json_are_in_the_document(recording: traindiff.Recording) -> None:
    content = recording.rank_content(0)

    known = set(named(paragraph("`rank.json`: ")))
    assert content.keys() <= known
    assert content["optimizers"][0].keys() <= known
    assert content["parameters"]["weight"].keys() <= known


def test_phases_stages_and_special_paths_are_those_of_the_code() -> None:
    columns = {named(name)[0]: meaning for name, _, meaning in rows("\n## Columns") if named(name)}

    assert tuple(named(columns["phase"])) == site.PHASES
    stages = paragraph("Stages: ") + paragraph("Stages of the phase `grad`") + "".join(re.findall(r"\* `\w+`", FORMAT))
    assert {observation.SAMPLE, observation.BOUNDARY} <= set(named(stages))
    assert {observation.LOSS_SCALE, observation.ITSELF} <= set(named(paragraph("Special paths: ")))
    assert f"`{observation.ALL_GRADIENTS}`" in FORMAT
    assert f"plus 2^{observation.PLACE.bit_length() - 1} times" in columns["order"]


def test_the_ways_to_merge_are_those_of_the_code() -> None:
    columns = {named(name)[0]: meaning for name, _, meaning in rows("\n## Columns") if named(name)}

    assert tuple(named(columns["merge"])) == observation.Merge.__args__  # type: ignore[attr-defined]


def test_the_constants_of_the_hashes_are_those_of_the_code() -> None:
    code = {
        value for name, value in vars(hashing).items() if name.isupper() and isinstance(value, int) and value > 2**16
    }
    documented = {int(text, 16) for text in re.findall(r"0x[0-9A-F]{8,16}", FORMAT)}

    assert documented == code | {0x80000001}
    assert f"block = i div {hashing.BLOCK}" in FORMAT
    assert f"mod {SKETCH_SIZE}\n" in FORMAT


def test_the_sizes_of_profiles_and_histograms_are_those_of_the_code() -> None:
    assert f"(row div ceil(R / {BUCKETS})) mod {BUCKETS}" in FORMAT
    assert f"`exponents` has {elementwise.EXPONENT_BINS} counts" in FORMAT
    assert f"= k - {-elementwise.EXPONENT_FIRST}`" in FORMAT


def test_a_seal_is_written_as_the_document_says() -> None:
    assert "    OFFSET LENGTH CRC\\n" in FORMAT
    assert seal(12, b"abc") == f"12 3 {zlib.crc32(b'abc'):08x}\n".encode()
