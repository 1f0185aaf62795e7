"""The dataflow around a finding."""

from __future__ import annotations

from tests.made_up import BATCH, FC, HEAD, Compared, Seen, Step, at, both, random, scaled
from traindiff.analyse.compare import Comparison
from traindiff.present.page import page_of
from traindiff.present.page.dataflow import message


def flow(result: Comparison) -> list[list[tuple[str, str, str]]]:
    return [[(node.phase, node.site, node.status) for node in column] for column in page_of(result).flow]


def test_an_activation_stands_between_what_comes_before_and_what_follows(compared: Compared) -> None:
    result = compared(both(scaled(FC, 1e-2, step=1), scaled(HEAD, 1e-2, step=1)), history=True)

    assert flow(result) == [
        [("batch", "(root) input[0]", "identical")],
        [("forward", "fc output[0]", "above")],
        [("forward", "head output[0]", "follows")],
        [("backward", "head output[0]", "identical")],
    ]
    (first,) = [node for column in page_of(result).flow for node in column if node.first]
    assert first.site == "fc output[0]"
    assert first.size.endswith(" x floor")


def test_a_backward_pass_is_not_what_the_next_models_batch_comes_from(compared: Compared) -> None:
    def another_model(step: int, sites: Step) -> None:
        sites["backward", "", "critic", "output[0]"] = Seen(values=random(4, seed=step), about={"order": -1})

    result = compared(both(another_model, scaled(FC, 1e-2, step=1)), baseline_edit=another_model, history=True)

    assert flow(result)[0] == [("batch", "(root) input[0]", "identical")]


def test_a_gradient_follows_from_what_its_module_received_and_from_the_gradient_of_its_output(
    compared: Compared,
) -> None:
    result = compared(at(("grad", "", "head.weight", "grad"), lambda values: values * 2, step=1), history=True)

    assert flow(result) == [
        [("forward", "fc output[0]", "identical"), ("backward", "head output[0]", "identical")],
        [("grad", "head.weight grad", "above")],
        [("optimizer", "head.weight momentum_buffer", "identical")],
        [("update", "head.weight update", "identical")],
    ]


def test_optimizer_state_follows_from_the_gradient(compared: Compared) -> None:
    site = ("optimizer", "", "fc.bias", "momentum_buffer")
    result = compared(at(site, lambda values: values * 2, step=1), history=True)

    assert [[node[0] for node in column] for column in flow(result)] == [
        ["batch", "backward"], ["grad"], ["optimizer"], ["update"],
    ]  # fmt: skip


def test_equal_runs_have_no_such_picture(compared: Compared) -> None:
    assert flow(compared(history=True)) == []


def test_a_column_is_said_in_words(compared: Compared) -> None:
    page = page_of(compared(scaled(FC, 1e-2, step=1), history=True))

    assert message(page.flow[0]) == "batch (root) input[0]: identical, same bits"


def test_what_comes_after_another_batch_follows_from_it(compared: Compared) -> None:
    def other(step: int, sites: Step) -> None:
        at(BATCH, lambda values: values + 1)(step, sites)
        scaled(FC, 0.5)(step, sites)

    page = page_of(compared(other, history=True))

    assert [(node.site, node.status, node.size) for column in page.flow for node in column][:2] == [
        ("(root) input[0]", "above", "differs"), ("fc output[0]", "follows", "0.5, follows"),
    ]  # fmt: skip
