"""Numbers in the texts of a recording may have any number of digits, of which Python reads 4,300."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

import traindiff
from tests.made_up import Seen, Step, random, record
from tests.storage.hostile import change_json, messages_of, put_messages

ENDLESS = "9" * 5_000
SITES = [
    ("optimizer", "", f"optimizer.groups[{ENDLESS}]", "lr"),
    ("forward", "boundary", f"stage[{ENDLESS}]", "sent[0]"),
    ("backward", "boundary", f"stage[{ENDLESS}]", f"received[{ENDLESS}]"),
    ("backward", f"again[{ENDLESS}]", "fc", "output[0]"),
    ("forward", "operator", f"fc/aten.add[{ENDLESS}]", "output[0]"),
    ("loss", "", f"loss/{ENDLESS}", "logged"),
]


@pytest.mark.parametrize("site", SITES)
def test_a_name_with_an_endless_number_is_a_name(site: tuple[str, str, str, str], tmp_path: Path) -> None:
    def add(factor: float) -> Path:
        def edit(step: int, sites: Step) -> None:
            sites[site] = Seen(values=random(2, seed=step) * np.float32(factor))

        return record(tmp_path / f"by-{factor:g}", edit)

    assert traindiff.compare(add(1), add(2)).verdict in ("diverged", "misaligned", "identical")
    assert traindiff.check(tmp_path / "by-1").verdict in ("healthy", "unhealthy")


@pytest.mark.parametrize("steps", [ENDLESS, f"0-{ENDLESS}", f"1-{' ' * 1_000_000}x", "0," * 10_000_000 + "0"])
def test_steps_that_a_recording_says_it_was_asked_for_are_read_in_a_moment_or_not_at_all(
    steps: str, tmp_path: Path
) -> None:
    run = record(tmp_path / "run")
    change_json(run / "run.json", lambda content: content["settings"].update(steps=steps))
    put_messages(run / "rank-00000", messages_of(run / "rank-00000")[:-1])  # so that it matters whether more would come
    begun = time.monotonic()

    verdict = traindiff.check(run)

    assert verdict.verdict == "incomplete"
    assert time.monotonic() - begun < 10
