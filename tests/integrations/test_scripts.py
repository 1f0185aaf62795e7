"""Scripts in the idiom of each library, under `traindiff run`: the same bits, equal recordings, and healthy."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import traindiff
from tests.run.script.running_scripts import plain, recorded
from tests.run.script.test_same_bits import assert_same_bits

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
LIBRARY = {"fabric": "lightning"}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_computes_the_same_bits_and_its_recordings_are_identical_and_healthy(
    script: Path, tmp_path: Path
) -> None:
    name = script.stem.partition("_")[0]
    library = LIBRARY.get(name, name)
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed; make test-integrations")

    def run(kind: str) -> Path:
        (tmp_path / kind).mkdir()
        recording = tmp_path / f"{kind}-recording"
        weights = "weights.pt"
        ended = (
            plain(script, weights, cwd=tmp_path / kind)
            if kind == "plain"
            else recorded(script, weights, output=recording, cwd=tmp_path / kind)
        )
        assert ended.code == 0, ended.errors
        return recording

    run("plain")
    first, second = run("recorded"), run("again")

    assert_same_bits(tmp_path / "plain" / "weights.pt", tmp_path / "recorded" / "weights.pt")
    comparison = traindiff.compare(first, second)
    assert (comparison.verdict, comparison.exit_code) == ("identical", 0), str(comparison)
    verdict = traindiff.check(first)
    assert (verdict.verdict, verdict.exit_code) == ("healthy", 0), str(verdict)
