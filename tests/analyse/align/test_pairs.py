"""Which site of one run is which of the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.analyse.merge.test_step_table import part
from tests.made_up import CONTENT, GROUPS, Compared, Edit, Seen, Site, Step, at, random, record
from traindiff.analyse.align.pairs import align
from traindiff.analyse.compare import compare
from traindiff.analyse.merge.renames import parse_renames
from traindiff.analyse.merge.site import Part
from traindiff.analyse.merge.step_table import step_table
from traindiff.core.shards import Shard
from traindiff.errors import ConfigError


def _renamed(_step: int, sites: Step) -> None:
    for phase, stage, path, slot in list(sites):
        if path.startswith("head"):
            sites[phase, stage, "model." + path.replace("head", "output"), slot] = sites.pop((phase, stage, path, slot))


RENAMED = {
    **CONTENT,
    "modules": {"": "Sample", "fc": "Linear", "model.output": "Linear"},
    "parameters": {"fc.weight": {}, "fc.bias": {}, "model.output.weight": {}},
    "optimizers": [{"name": "optimizer", "type": "SGD", "groups": [["fc.weight", "model.output.weight"], ["fc.bias"]]}],
}


def test_renamed_sites_are_unaligned_without_a_rule(compared: Compared) -> None:
    comparison = compared(_renamed, content=RENAMED)

    assert comparison.verdict == "incomplete"
    assert {one.path for one in comparison.unaligned[0]} == {"head", "head.weight"}
    assert "model.output" in {one.path for one in comparison.unaligned[1]}


@pytest.mark.parametrize(
    "rename",
    [
        [r"^model\.output=head"],
        {r"^model\.output": "head"},
        {r"^model\.": "", "output": "head"},
        [r"^model\.(out)put=head"],
    ],
)
def test_rules_bring_renamed_sites_together(compared: Compared, rename: list[str] | dict[str, str]) -> None:
    comparison = compared(_renamed, content=RENAMED, rename=rename)

    assert comparison.verdict == "identical", str(comparison)
    assert comparison.unaligned == ((), ())


def test_a_rule_may_refer_to_groups_and_hold_an_equals_sign_in_its_replacement() -> None:
    assert parse_renames([r"layers\.(\d+)=h.\1"])("layers.12.attn") == "h.12.attn"
    assert parse_renames(["a=b=c"])("a") == "b=c"


def test_without_rules_paths_stay() -> None:
    assert parse_renames(None)("a.b") == "a.b"
    assert parse_renames([])("a.b") == "a.b"


def test_every_wrong_rule_is_listed_with_what_is_wrong_with_it() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_renames(["head", "fine=better", "(=x", "=x", r"(a)=\2"])

    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        ("rename head", 'has no "=".'),
        ("rename (=x", "is not a regular expression: missing ), unterminated subpattern at position 0."),
        ("rename =x", 'has no pattern before the "=".'),
        (r"rename (a)=\2", "is not a regular expression: invalid group reference 2 at position 1."),
    ]
    assert all("e.g. '^model" in problem.fix for problem in caught.value.problems)


def test_a_rule_that_changes_nothing_is_said(compared: Compared) -> None:
    assert compared(rename=["nothing=x", "^head=head"]).notes == (
        "--rename nothing=x changes no path of the candidate.",
    )


def test_a_rule_that_gives_two_sites_one_name_is_refused(compared: Compared) -> None:
    with pytest.raises(ConfigError, match=r"gives fc and head of the candidate the same path, fc\."):
        compared(rename=["head=fc"])


def test_a_module_that_is_called_more_often_is_a_finding(compared: Compared) -> None:
    def twice(_step: int, sites: Step) -> None:
        values = sites["forward", "", "fc", "output[0]"].values
        sites["forward", "", "fc", "output[1]"] = Seen(values=values, about={"call": 1})

    first = compared(twice).first_divergence
    assert first is not None
    assert first.message == "The candidate calls fc more often in one micro-step than the baseline."


def test_recordings_of_other_models_are_told(tmp_path: Path) -> None:
    def other(_step: int, sites: Step) -> None:
        for site in [site for site in sites if site[2].partition(".")[0] in ("fc", "head")]:
            sites[(*site[:2], f"conv.{site[2]}", site[3])] = sites.pop(site)

    def renamed(part: dict[str, Any]) -> dict[str, Any]:
        return {f"conv.{path}" if path else "": one for path, one in part.items()}

    parts = {name: renamed(CONTENT[name]) for name in ("modules", "parameters")}
    optimizers = [{**CONTENT["optimizers"][0], "groups": [[f"conv.{path}" for path in group] for group in GROUPS]}]
    content = {**CONTENT, **parts, "model": "Other", "optimizers": optimizers}
    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c", other, content=content))

    assert comparison.exit_code == 3
    assert comparison.notes[-1] == (
        "The recordings are of different models, Sample and Other: no module or parameter has the same path in both. "
        "Give recordings of one model, or --rename PATTERN=REPLACEMENT."
    )


def test_a_module_that_is_not_called_is_a_finding(compared: Compared) -> None:
    def without(_step: int, sites: Step) -> None:
        del sites["forward", "", "fc", "output[0]"]
        del sites["backward", "", "fc", "output[0]"]

    first = compared(without).first_divergence
    assert first is not None
    assert (first.kind, first.step, first.phase, first.path) == ("missing", 0, "forward", "fc")
    assert first.message == "The candidate does not call fc; the baseline does."


def test_a_missing_gradient_is_not_outdone_by_the_clipping_that_follows_from_it(compared: Compared) -> None:
    def more(_step: int, sites: Step) -> None:
        for number in range(6):
            values = random(8, 6, seed=50 + number)
            sites["grad", "", f"fc.{number}", "grad"] = Seen(values=values, about={"order": 10 + number})

    def without(step: int, sites: Step) -> None:
        more(step, sites)
        for site in [site for site in sites if site[0] == "grad"]:
            sites[site].values = sites[site].values * np.float32(1.02)
        sites["grad", "", "head.weight", "grad"].about["unobserved"] = "no gradient: none"

    first = compared(without, baseline_edit=more).first_divergence
    assert first is not None
    assert first.message == "In the candidate, head.weight gets no gradient; in the baseline it does."


def test_a_module_that_only_the_candidate_calls_is_a_finding(compared: Compared) -> None:
    def without(_step: int, sites: Step) -> None:
        del sites["forward", "", "fc", "output[0]"]

    first = compared(baseline_edit=without).first_divergence
    assert first is not None
    assert (first.kind, first.path) == ("extra", "fc")
    assert first.message == "The baseline does not call fc; the candidate does."


def test_a_site_of_an_unknown_module_is_unaligned_and_no_finding(compared: Compared) -> None:
    def more(_step: int, sites: Step) -> None:
        sites["forward", "", "attention.scores", "value"] = Seen(values=np.ones(3, np.float32))

    comparison = compared(more)

    assert comparison.verdict == "incomplete"
    assert not comparison.findings
    assert [(one.path, one.first_step, one.num_steps) for one in comparison.unaligned[1]] == [
        ("attention.scores", 0, 3)
    ]


def test_a_gradient_that_only_one_run_has_is_a_finding(compared: Compared) -> None:
    def without(_step: int, sites: Step) -> None:
        about = {"unobserved": "no gradient: parameter.grad is None when the optimizer steps", "dtype": ""}
        sites["grad", "", "fc.bias", "grad"] = Seen(values=np.zeros(()), about=about)

    first = compared(without).first_divergence
    assert first is not None
    assert (first.kind, first.phase, first.path) == ("missing", "grad", "fc.bias")
    assert first.message == "In the candidate, fc.bias gets no gradient; in the baseline it does."


def test_a_gradient_that_neither_run_has_is_nothing(compared: Compared) -> None:
    def without(_step: int, sites: Step) -> None:
        about = {"unobserved": "no gradient: parameter.grad is None when the optimizer steps", "dtype": ""}
        sites["grad", "", "fc.bias", "grad"] = Seen(values=np.zeros(()), about=about)

    assert compared(without, baseline_edit=without).verdict == "identical"


def test_an_optimizer_that_does_not_hold_a_parameter_is_named(compared: Compared) -> None:
    def without(_step: int, sites: Step) -> None:
        for phase, slot in (("grad", "grad"), ("optimizer", "momentum_buffer"), ("param", "value")):
            del sites[phase, "", "fc.bias", slot]

    content = {**CONTENT, "optimizers": [{"name": "optimizer", "type": "SGD", "groups": [GROUPS[0], []]}]}
    comparison = compared(without, content=content)

    first = comparison.first_divergence
    assert first is not None
    assert (first.kind, first.path) == ("missing", "fc.bias")
    assert first.message == "The candidate's optimizer does not hold fc.bias; the baseline's does."
    assert len(comparison.findings) == 1


def hidden(site: Site, why: str = "a sparse tensor") -> Edit:
    def edit(_step: int, sites: Step) -> None:
        sites[site].about["unobserved"] = why

    return edit


HIDDEN: Site = ("forward", "", "fc", "output[0]")


def test_what_one_run_could_not_observe_is_unknown_and_not_equal(compared: Compared) -> None:
    for edits in ({"baseline_edit": hidden(HIDDEN, "a subclass")}, {}):
        comparison = compared(hidden(HIDDEN), **edits)

        assert comparison.verdict == "incomplete"
        assert "Not observed, so unknown: forward fc output[0] (a " in comparison.notes[0]


def test_runs_of_the_same_bits_are_identical_where_both_could_not_observe_the_same(compared: Compared) -> None:
    comparison = compared(hidden(HIDDEN), baseline_edit=hidden(HIDDEN))

    assert (comparison.verdict, comparison.exit_code) == ("identical", 0)
    assert comparison.notes == ("Not observed, so unknown: forward fc output[0] (a sparse tensor).",)


def test_what_neither_run_could_observe_stays_unknown_where_another_tensor_has_other_bits(compared: Compared) -> None:
    rounded = at(("forward", "", "head", "output[0]"), lambda x: x * np.float32(1 + 2e-7))

    def both(step: int, sites: Step) -> None:
        hidden(HIDDEN)(step, sites)
        rounded(step, sites)

    assert compared(both, baseline_edit=hidden(HIDDEN)).verdict == "incomplete"


def test_runs_of_which_neither_shows_what_is_learned_are_not_identical(compared: Compared) -> None:
    def activations(_step: int, sites: Step) -> None:
        for site, seen in sites.items():
            if site[0] not in ("batch", "forward"):
                seen.about["unobserved"] = "only its extremes are kept"

    assert compared(activations, baseline_edit=activations).verdict == "incomplete"


def test_a_batch_axis_that_was_not_recognized_is_explained(compared: Compared) -> None:
    comparison = compared(at(("forward", "", "fc", "output[0]"), lambda x: np.vstack([x, x])))

    assert comparison.verdict == "incomplete"
    assert not comparison.findings
    assert "its shape is [5, 8] in the baseline and [10, 8] in the candidate" in comparison.notes[0]


def test_another_shape_is_a_finding(compared: Compared) -> None:
    first = compared(at(("forward", "", "fc", "output[0]"), lambda x: x[:, :-1])).first_divergence

    assert first is not None
    assert first.kind == "shape"
    assert first.message == "The shape is [5, 8] in the baseline and [5, 7] in the candidate."


def test_execution_order_is_the_baselines(tmp_path: Path) -> None:
    def wrong(step: int, sites: Step) -> None:
        at(("forward", "", "fc", "output[0]"), np.negative)(step, sites)
        at(("forward", "", "head", "output[0]"), np.negative)(step, sites)
        # The candidate calls its modules in another order.
        late = sites.pop(("forward", "", "fc", "output[0]"))
        sites["forward", "", "fc", "output[0]"] = late

    comparison = compare(record(tmp_path / "b"), record(tmp_path / "c", wrong))

    assert comparison.first_divergence is not None
    assert comparison.first_divergence.path == "fc"


def test_a_gradient_that_is_missing_on_one_rank_is_missing_there(tmp_path: Path) -> None:
    def lost(_step: int, sites: Step) -> None:
        sites["grad", "", "head.weight", "grad"].about["unobserved"] = "no gradient: none"

    record(tmp_path / "one")
    for rank in range(3):
        edit = lost if rank == 1 else lambda step, sites: None
        record(tmp_path / "run", edit, rank=rank, run={"world_size": 3})

    first = compare(tmp_path / "one", tmp_path / "run").first_divergence

    assert first is not None
    assert first.message == "In the candidate, head.weight gets no gradient on rank 1; in the baseline it does."
    assert first.rank == 1


OUTPUT = ("forward", "", "fc", "output[0]")


def aligned(baseline: list[Part], candidate: list[Part]) -> tuple[int, int, int]:
    """How many sites are paired, stand alone, and have a batch axis that was not recognized."""
    found = align(step_table(baseline), step_table(candidate))
    return len(found.pairs), len(found.only_baseline) + len(found.only_candidate), len(found.unmerged)


@pytest.mark.parametrize(
    ("shapes", "site", "unmerged"),
    [
        (((4, 6), (8, 6)), OUTPUT, 1),
        (((8, 6), (4, 6)), OUTPUT, 1),
        (((4, 6), (6, 6)), OUTPUT, 0),
        (((4, 6), (8, 3)), OUTPUT, 0),
        (((4, 6), (4, 3)), OUTPUT, 0),
        (((0, 6), (8, 6)), OUTPUT, 0),
        (((4, 6), (4, 6, 1)), OUTPUT, 0),
        (((4, 6), (8, 6)), ("grad", "", "fc.weight", "grad"), 0),
    ],
)
def test_one_shape_that_is_a_multiple_of_the_other_along_axis_0_is_a_batch_axis_that_was_not_recognized(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], site: Site, unmerged: int
) -> None:
    baseline, candidate = ([part(random(*shape, seed=0), site=site)] for shape in shapes)

    assert aligned(baseline, candidate) == (1 - unmerged, 0, unmerged)


def test_what_was_not_observed_has_no_shape() -> None:
    hidden = [part(random(4, 6, seed=0), unobserved="sparse")]

    assert aligned(hidden, [part(random(8, 6, seed=0))]) == (1, 0, 0)
    assert aligned([part(random(8, 6, seed=0))], hidden) == (1, 0, 0)


@pytest.mark.parametrize(
    ("shape", "unmerged"), [((3, 6), 1), ((6, 4), 1), ((3, 4), 0)], ids=["rows", "columns", "both"]
)
def test_in_runs_that_split_otherwise_any_one_axis_may_be_that_of_the_batch(
    shape: tuple[int, ...], unmerged: int
) -> None:
    whole = [part(random(6, 6, seed=0))]
    split = [part(random(*shape, seed=0)), part(random(5, seed=0), site=("loss", "", "loss", "value"), micro_step=1)]

    assert aligned(whole, split)[2] == unmerged


def test_what_one_run_has_more_often_is_paired_as_often_as_both_have_it() -> None:
    """A tensor that changes in each micro-step, and is not of the batch."""
    once = [part(random(3, seed=0))]
    thrice = [part(random(3, seed=step), micro_step=step) for step in range(3)]
    other = [
        part(random(3, seed=step), micro_step=step, site=("forward", "", "head", "output[0]")) for step in range(3)
    ]

    assert aligned(once, thrice) == (1, 0, 0)
    assert aligned(thrice, once) == (1, 0, 0)
    assert aligned(once, [*once, *other]) == (1, 3, 0)


def unmerged(baseline: tuple[int, ...], candidate: tuple[int, ...], *, phase: str = "forward", more: int = 0) -> bool:
    """Whether another shape is put down to a batch axis; the candidate has so many further micro-steps elsewhere."""

    def table(shape: tuple[int, ...], micro_steps: int) -> dict:
        site = (phase, "", "fc", "output[0]")
        others = [
            part(
                random(2, 3, seed=0), site=("forward", "", "other", "output[0]"), micro_step=number,
                order=1 + number, shard=Shard.of_batch((2, 3), first=2 * number),
            )
            for number in range(micro_steps)
        ]  # fmt: skip
        return step_table([part(random(*shape, seed=0), site=site), *others])

    found = align(table(baseline, 1), table(candidate, 1 + more)).unmerged
    return any(one.baseline.key.path == "fc" for one in found)


@pytest.mark.parametrize(
    ("shapes", "alike", "otherwise"),
    [
        (((8, 6), (8, 6)), False, False),
        (((8, 6), (4, 6)), True, True),
        (((4, 6), (8, 6)), True, True),
        (((8, 6), (3, 6)), False, True),  # no multiple
        (((8, 6), (0, 6)), False, True),
        (((8, 6), (8, 3)), False, True),  # another axis
        (((8, 6), (4, 3)), False, False),
        (((8, 6), (8, 6, 1)), False, False),
    ],
)
def test_another_shape_is_put_down_to_a_batch_axis_where_the_runs_may_divide_it_so(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], alike: bool, otherwise: bool
) -> None:
    assert unmerged(*shapes) == alike
    assert unmerged(*shapes, more=1) == otherwise


@pytest.mark.parametrize("phase", ["grad", "param", "update"])
def test_of_parameters_no_shape_is_put_down_to_a_batch_axis(phase: str) -> None:
    assert not unmerged((8, 6), (4, 6), phase=phase)


def test_a_batch_that_both_runs_divide_alike_is_another_batch() -> None:
    assert not unmerged((8, 6), (4, 6), phase="batch")
    assert unmerged((8, 6), (4, 6), phase="batch", more=1)
