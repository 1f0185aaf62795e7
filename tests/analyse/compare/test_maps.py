"""Two models with other modules, compared by a map: equivalent if they are, and a fault is found behind it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.analyse.compare.ports import MAP, WORDS, original, ported, train
from traindiff.analyse.compare import Comparison, compare
from traindiff.errors import ConfigError


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("ports") / "baseline", original())


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("maps") / "map.toml"
    file.write_text(MAP)
    return file


def by_map(baseline: Path, candidate: Path, layout: Path, **settings: object) -> Comparison:
    return compare(baseline, candidate, map=layout, **settings)  # type: ignore[arg-type]


def test_a_port_with_fused_and_renamed_modules_is_equivalent(baseline: Path, layout: Path, tmp_path: Path) -> None:
    port = train(tmp_path / "port", ported(original()))

    found = by_map(baseline, port, layout)

    assert (found.verdict, found.unaligned) == ("equivalent", ((), ())), str(found)
    sites = {(row.phase, row.path) for row in found.differences}
    assert ("forward", "h.1") in sites  # a module that holds renamed ones
    assert {("forward", "h.0.attn.{q,k,v}"), ("optimizer", "h.0.attn.{q,k,v}.bias")} <= sites
    assert sum("laid out otherwise" in note for note in found.notes) == 1
    assert not any("Not known in bits" in note for note in found.notes)


def test_without_the_map_the_port_cannot_be_compared(baseline: Path, tmp_path: Path) -> None:
    assert compare(baseline, train(tmp_path / "port", ported(original()))).verdict == "incomplete"


def test_the_map_works_the_other_way_around(baseline: Path, layout: Path, tmp_path: Path) -> None:
    text = layout.read_text().replace("baseline", "x").replace("candidate", "baseline").replace("x =", "candidate =")
    turned = tmp_path / "turned.toml"
    turned.write_text(text)
    port = train(tmp_path / "port", ported(original()))

    found = compare(port, baseline, map=turned)

    assert (found.verdict, found.unaligned) == ("equivalent", ((), ())), str(found)


def halved(model: nn.Module, step: int) -> None:
    if step == 1:
        gradient = dict(model.named_parameters())["blocks.1.mixer.qkv.weight"].grad
        assert gradient is not None
        gradient[:8] *= 0.5


def test_a_wrong_gradient_of_a_fused_tensor_is_located(baseline: Path, layout: Path, tmp_path: Path) -> None:
    found = by_map(baseline, train(tmp_path / "port", ported(original()), fault=halved), layout)

    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    first = found.first_divergence
    assert (first.step, first.phase, first.path) == (1, "grad", "h.1.attn.{q,k,v}.weight")
    assert "Its norm is" in first.message


def test_other_weights_in_a_fused_tensor_are_located(baseline: Path, layout: Path, tmp_path: Path) -> None:
    model = ported(original())
    with torch.no_grad():
        model.get_parameter("blocks.0.mixer.qkv.weight")[20, 3] *= 1.01

    found = by_map(baseline, train(tmp_path / "port", model), layout)

    assert found.verdict == "misaligned"
    assert found.first_divergence is not None
    assert found.first_divergence.path == "h.0.attn.{q,k,v}.weight"
    assert "starts with other values" in found.first_divergence.message


def test_exchanged_parts_of_a_fused_tensor_show_in_what_is_computed_from_them(
    baseline: Path, layout: Path, tmp_path: Path
) -> None:
    model = ported(original())
    with torch.no_grad():
        weight = model.get_parameter("blocks.1.mixer.qkv.weight")
        weight.copy_(torch.cat([weight[16:32], weight[:16], weight[32:]]))

    found = by_map(baseline, train(tmp_path / "port", model), layout)

    assert found.verdict == "diverged"
    assert found.first_divergence is not None
    assert found.first_divergence.phase == "forward"
    assert found.first_divergence.path in ("h.1.attn.{q,k,v}", "h.1.attn.o")


def test_a_padded_vocabulary_is_equivalent_and_a_padding_that_is_not_zero_is_not(
    baseline: Path, tmp_path: Path, layout: Path
) -> None:
    padded = tmp_path / "padded.toml"
    padded.write_text(layout.read_text() + '[[tensor]]\nbaseline = ["head.weight"]\ncandidate = ["head.weight"]\n')
    model = ported(original(), words=WORDS + 8)

    found = by_map(baseline, train(tmp_path / "port", model), padded)

    assert (found.verdict, found.unaligned) == ("equivalent", ((), ())), str(found)
    model = ported(original(), words=WORDS + 8)
    with torch.no_grad():
        model.head.weight[-1] = 0.5
    found = by_map(baseline, train(tmp_path / "other", model), padded)
    assert found.verdict == "misaligned"
    assert found.first_divergence is not None
    assert found.first_divergence.path == "head.weight"


def test_an_entry_that_names_nothing_is_warned_of(baseline: Path, layout: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(layout.read_text() + '[[tensor]]\nbaseline = ["nothing"]\ncandidate = ["nowhere"]\n')

    found = by_map(baseline, train(tmp_path / "port", ported(original())), wrong)

    assert found.verdict == "equivalent"
    assert any("(nothing) names what is not there" in note for note in found.notes)


def test_a_map_that_cannot_be_used_is_refused(baseline: Path, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text('[[module]]\nbaseline = "a.{n}"\ncandidate = "b"\n')

    with pytest.raises(ConfigError, match="is in one of its names only"):
        compare(baseline, baseline, map=tmp_path / "map.toml")


def test_accepted_differences_are_listed_and_not_judged(baseline: Path, layout: Path, tmp_path: Path) -> None:
    accept = tmp_path / "accept.toml"
    accept.write_text('[[accept]]\nname = "h.*.weight"\nreason = "tried"\n[[accept]]\nname = "none"\nreason = "old"\n')
    port = train(tmp_path / "port", ported(original()), fault=halved)

    found = by_map(baseline, port, layout, accept=accept)

    assert (found.verdict, found.findings) == ("equivalent", ()), str(found)
    assert any("Accepted, so not judged (tried): grad of h.1.attn.{q,k,v}.weight grad" in note for note in found.notes)
    assert any('nothing that differs is named "none"' in note for note in found.notes)


def test_a_module_that_one_run_lacks_may_be_accepted(tmp_path: Path) -> None:
    model = original()
    model.more = nn.Linear(2, 2)
    accept = tmp_path / "accept.toml"
    accept.write_text('[[accept]]\nname = "more.*"\nreason = "is not used"\n')
    runs = train(tmp_path / "one", original(), steps=1), train(tmp_path / "two", model, steps=1)

    assert compare(*runs).verdict == "incomplete"
    assert compare(*runs, accept=accept).verdict == "identical"
