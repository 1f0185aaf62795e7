"""Ignored sites: they are no findings, all of that is said, and what follows from them is never called equivalent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.made_up import Array, Compared, at, both
from traindiff.errors import ConfigError

FC, HEAD = ("forward", "", "fc", "output[0]"), ("forward", "", "head", "output[0]")
GRAD = ("grad", "", "head.weight", "grad")


def times(factor: float) -> Callable[[Array], Array]:
    return lambda x: x * np.float32(factor)


def test_a_difference_that_reaches_nothing_is_equivalent_and_said(compared: Compared) -> None:
    found = compared(at(HEAD, times(1.01)), ignore="head*")

    assert (found.verdict, found.ignored_sites, found.findings) == ("equivalent", 1, ())
    assert "no difference exceeds its floor, except at 1 ignored site" in str(found)
    assert 'Ignored, so not judged ("head*"): ' in str(found)
    assert "of which forward of head output[0] would be a finding." in str(found)
    assert found.words["above"] == 1


def test_what_follows_from_an_ignored_site_is_not_equivalent(compared: Compared) -> None:
    edit = both(at(FC, times(1.5)), at(HEAD, times(1.4)))
    whole = compared(edit)
    found = compared(edit, ignore=["fc output[0]"])

    assert whole.words["follows"] > 0
    assert (found.verdict, found.findings, found.ignored_sites) == ("incomplete", (), 1)
    assert "What is ignored differs, and forward of head output[0] may follow from it" in str(found)


def test_a_fault_elsewhere_is_still_found(compared: Compared) -> None:
    found = compared(both(at(HEAD, times(1.01)), at(GRAD, times(2.0))), ignore=["head", "head output*"])

    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    assert (found.first_divergence.path, found.first_divergence.slot) == ("head.weight", "grad")


def test_a_glob_without_a_site_is_warned_of_and_one_that_differs_in_nothing_is_not(compared: Compared) -> None:
    found = compared(ignore=["nothing.*", "fc*"])

    assert found.verdict == "identical"
    assert 'Warning: no site is named "nothing.*", as --ignore says.' in found.notes
    assert [note for note in found.notes if note.startswith('Ignored, so not judged ("fc*")')]
    assert not [note for note in found.notes if note.startswith('Warning: no site is named "fc*"')]


def test_an_ignored_site_of_one_run_only_leaves_nothing_open(compared: Compared) -> None:
    def without(_: int, sites: dict[tuple[str, str, str, str], object]) -> None:
        del sites[HEAD]

    assert compared(without).verdict != "identical"
    found = compared(without, ignore="head output[0]")

    assert (found.verdict, found.unaligned) == ("equivalent", ((), ()))
    assert "no difference exceeds its floor, except at 1 ignored site" in str(found)


def test_the_json_counts_ignored_and_accepted_sites(compared: Compared, tmp_path: Path) -> None:
    accept = tmp_path / "accept.toml"
    accept.write_text('[[accept]]\nname = "head output[0]"\nreason = "a new head"\n')
    found = compared(both(at(HEAD, times(1.01)), at(GRAD, times(2.0))), ignore="head.weight grad", accept=accept)

    assert (found.to_json()["accepted_sites"], found.to_json()["ignored_sites"]) == (1, 1)
    assert "Accepted, so not judged (a new head): forward of head output[0]." in str(found)


@pytest.mark.parametrize("ignore", ["", [3], [""], 5])
def test_what_is_no_glob_is_refused(compared: Compared, ignore: object) -> None:
    with pytest.raises(ConfigError, match="is no glob over sites"):
        compared(ignore=ignore)
