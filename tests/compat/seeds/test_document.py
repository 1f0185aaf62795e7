"""benchmarks/SEEDS.md is what `make seeds` writes of the systems as they are now, and nothing is missing in it."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from benchmarks.seeds.__main__ import RESULTS, SYSTEMS
from benchmarks.seeds.table import document, sections

KNOWN = [import_module(name) for one in SYSTEMS if find_spec(name := f"benchmarks.seeds.{one}")]
WRITTEN = RESULTS.read_text()


def test_every_system_has_a_section_of_the_packages_that_are_pinned_or_is_named_as_not_run() -> None:
    found = sections(WRITTEN)

    assert set(found) <= {one.TITLE for one in KNOWN}
    for one in KNOWN:
        packages = f"Original: {', '.join(one.PACKAGES)}. Run on "
        assert not one.PACKAGES or packages in found.get(one.TITLE, packages), one.TITLE


def test_no_feature_is_missing_and_the_counts_are_those_of_the_rows() -> None:
    assert "| missing |" not in WRITTEN.split("\n## ", 1)[1]
    assert document(sections(WRITTEN), titles=[one.TITLE for one in KNOWN]) == WRITTEN
