"""Rules that the run has nothing for are told from rules that found nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.made_up import FC, at, record
from traindiff.analyse.check import RULES, Rule, Verdict, check
from traindiff.errors import ConfigError

NAN = at(FC, lambda values: values * np.float32("nan"), step=1)


def answers(verdict: Verdict) -> dict[str, str]:
    return {rule.name: rule.result for rule in verdict.rules}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_that_may_have_nothing_to_judge_says_what_it_needs(rule: type[Rule]) -> None:
    assert bool(rule.needs) == (rule.applies is not Rule.applies)


def test_what_a_run_lacks_is_not_held_to_be_kept(tmp_path: Path) -> None:
    verdict = check(record(tmp_path / "run", steps=4))
    found, why = answers(verdict), {rule.name: rule.unknown for rule in verdict.rules}

    assert (found["non-finite"], found["ranks-disagree"]) == ("nothing found", "not applicable")
    assert why["ranks-disagree"] == ("It needs several ranks",)
    assert why["vanishing-gradients"] == ("It needs 10 steps; the run has 4",)
    counts = [sum(answer == one for answer in found.values()) for one in ("nothing found", "not applicable")]
    said = f"{len(RULES)} rules: {counts[0]} found nothing, {counts[1]} not applicable ("
    assert said in str(verdict)


def test_several_ranks_have_copies_to_judge(tmp_path: Path) -> None:
    for rank in range(2):
        run = record(tmp_path / "run", rank=rank, run={"world_size": 2})

    assert answers(check(run))["ranks-disagree"] == "nothing found"


def test_rules_that_were_left_out_are_counted(tmp_path: Path) -> None:
    run = record(tmp_path / "run")

    assert (
        check(run, rules="non-finite").rules_sentence()
        == f"1 rule: 1 found nothing; {len(RULES) - 1} more were not asked."
    )
    assert check(run, skip="spike").rules_sentence().endswith("; 1 more was not asked.")


def test_findings_at_ignored_sites_are_counted_and_leave_a_run_healthy(tmp_path: Path) -> None:
    run = record(tmp_path / "run", NAN, steps=2)
    assert check(run).verdict == "unhealthy"
    verdict = check(run, ignore=["fc", "nowhere.*"])

    assert (verdict.verdict, verdict.findings, verdict.ignored_sites) == ("healthy", (), 1)
    assert answers(verdict)["non-finite"] == "ignored"
    assert any(
        note.startswith('Ignored, so not judged ("fc"): ') and note.endswith("non-finite at forward of fc output[0].")
        for note in verdict.notes
    ), verdict.notes
    assert 'Warning: no site is named "nowhere.*", as --ignore says.' in verdict.notes
    assert verdict.to_json()["ignored_sites"] == 1


def test_other_findings_are_not_ignored(tmp_path: Path) -> None:
    run = record(tmp_path / "run", NAN, steps=2)

    assert check(run, ignore="head").verdict == "unhealthy"


def test_a_glob_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no glob over sites"):
        check(record(tmp_path / "run"), ignore=[""])


@pytest.mark.parametrize("ignored", [("fc.weight",), ("fc.weight", "fc.bias")])
def test_a_finding_about_several_parameters_counts_unless_all_are_ignored(ignored: tuple[str, ...]) -> None:
    from traindiff.analyse.check.ignored_sites import IgnoredSites
    from traindiff.analyse.findings import Finding

    paths = ["fc.weight", "fc.bias"]
    finding = Finding(
        step=0, phase="grad", path=paths[0], slot="grad", order=0, kind="carried-gradient", message="",
        evidence={"paths": paths},
    )  # fmt: skip
    sites = IgnoredSites(ignored)

    assert list(sites.left([finding])) == ([] if len(ignored) == 2 else [finding])
    assert len(sites.found) == len(ignored) - 1
