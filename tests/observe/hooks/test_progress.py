"""Steps and micro-steps."""

from __future__ import annotations

from traindiff.observe.common.progress import Batch, Progress

BATCH = Batch(size=4, lengths=frozenset({4}))
SMALL = Batch(size=2, lengths=frozenset({2}))


def forward(progress: Progress, batch: Batch | None = BATCH, *, evaluating: bool = False) -> None:
    with progress.forward(batch, evaluating=evaluating):
        assert progress.batch is batch
        assert progress.evaluating is evaluating


def test_a_forward_after_a_backward_begins_the_next_micro_step() -> None:
    progress = Progress()
    seen = []
    for _ in range(3):
        forward(progress)
        seen.append(progress.micro_step)
        progress.end_backward()
        seen.append(progress.micro_step)

    assert seen == [0, 0, 1, 1, 2, 2]


def test_several_forwards_before_one_backward_are_one_micro_step() -> None:
    progress = Progress()
    calls = []
    for _ in range(3):
        forward(progress)
        calls.append(progress.next_call("layer", ""))
    progress.end_backward()
    progress.end_backward()
    forward(progress)

    assert calls == [0, 1, 2]
    assert progress.micro_step == 1
    assert progress.next_call("layer", "") == 0


def test_a_backward_without_a_forward_before_it_counts_nothing() -> None:
    progress = Progress()
    progress.end_backward()
    forward(progress)

    assert progress.micro_step == 0


def test_an_evaluation_changes_nothing_of_the_training() -> None:
    progress = Progress()
    forward(progress)
    progress.end_backward()
    forward(progress, SMALL, evaluating=True)

    assert (progress.micro_step, progress.samples, progress.latest_batch) == (0, 4, BATCH)
    forward(progress)
    assert progress.micro_step == 1


def test_the_current_batch_lasts_until_the_step_ends() -> None:
    progress = Progress()
    assert progress.current_batch is None
    forward(progress)
    assert (progress.batch, progress.current_batch) == (None, BATCH)
    with progress.forward(SMALL, evaluating=True):
        assert progress.current_batch is SMALL
    with progress.forward(None, evaluating=True):
        assert progress.current_batch is None
    progress.end_step("optimizer", observing=True)
    assert progress.current_batch is None
    assert progress.samples == 4  # a scalar that is logged late still has its weight


def test_a_step_starts_all_counters_again() -> None:
    progress = Progress()
    forward(progress)
    progress.end_backward()
    forward(progress)
    assert [progress.next_order() for _ in range(3)] == [0, 1, 2]
    assert [progress.rows(("site",), 4, samples=1)[0] for _ in range(2)] == [0, 4]
    progress.end_step("optimizer", observing=False)

    assert (progress.step, progress.micro_step, progress.observing) == (1, 0, False)
    assert progress.next_order() == 0
    assert progress.next_order(late=True) == 3
    assert progress.rows(("site",), 4, samples=1)[0] == 0
    forward(progress)
    assert progress.micro_step == 0


def test_only_the_first_optimizer_moves_the_step_on() -> None:
    progress = Progress(optimizer="generator")
    forward(progress)
    progress.next_order()
    progress.end_step("critic", observing=False)

    assert (progress.step, progress.observing, progress.next_order()) == (0, True, 1)
    assert progress.steps == {"critic": 1}
    progress.end_step("generator", observing=False)
    assert (progress.step, progress.observing) == (1, False)


def test_rows_of_different_sites_are_counted_apart() -> None:
    progress = Progress()

    assert progress.rows(("a",), 3, samples=1)[0] == 0
    assert progress.rows(("b",), 5, samples=1)[0] == 0
    assert progress.rows(("a",), 1, samples=1)[0] == 3
