"""The buffers of a step: slots, tickets, growth, tables; nothing is lost and nothing is mixed up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.core.kernels.gpu.expected import expected_summary
from tests.core.kernels.rounding import assert_equal_up_to_rounding
from traindiff.core import summary
from traindiff.core.kernels.gpu import launch
from traindiff.core.kernels.gpu import table as reading
from traindiff.core.kernels.gpu.layout import WORDS
from traindiff.core.kernels.gpu.rows import DeviceRows
from traindiff.core.shards import Shard


def numbers(*shapes: tuple[int, ...], device: torch.device, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def whole(tensors: Sequence[torch.Tensor]) -> list[Shard]:
    return [Shard.whole(tuple(tensor.shape)) for tensor in tensors]


def assert_rows(actual: summary.Summaries, tensors: Sequence[torch.Tensor]) -> None:
    assert len(actual) == len(tensors)
    for row, tensor, shard in zip(actual, tensors, whole(tensors), strict=True):
        assert_equal_up_to_rounding(row, expected_summary(tensor, shard))


def test_slots_count_from_0_in_every_step(device: torch.device) -> None:
    rows = DeviceRows(device)
    for step in range(3):
        tensors = numbers((3,), (70, 2), (), device=device, seed=step)
        assert [rows.add(tensor, shard) for tensor, shard in zip(tensors, whole(tensors), strict=True)] == [0, 1, 2]
        assert_rows(rows.end_step().result(), tensors)


def test_an_empty_step_has_no_rows(device: torch.device) -> None:
    assert DeviceRows(device).end_step().result().shape == (0,)


def test_a_ticket_read_late_has_its_own_steps_rows(device: torch.device) -> None:
    rows = DeviceRows(device, rows=1, partials=1, elements_per_part=40)
    steps = [numbers((5, 9), (30,), device=device, seed=step) for step in range(5)]
    tickets = []
    for tensors in steps:
        rows.add_many(tensors, whole(tensors))
        tickets.append(rows.end_step())
    for ticket, tensors in reversed(list(zip(tickets, steps, strict=True))):
        assert_rows(ticket.result(), tensors)
        assert ticket.result() is ticket.result()


def test_a_step_in_progress_knows_its_ticket(device: torch.device) -> None:
    rows = DeviceRows(device)
    ticket = rows.ticket
    assert not ticket.ended
    assert rows.end_step() is ticket
    assert ticket.ended
    assert rows.ticket is not ticket


def test_buffers_grow_and_lose_nothing(device: torch.device) -> None:
    tensors = numbers(*[(length, 3) for length in range(1, 40, 3)], device=device)
    rows = DeviceRows(device, rows=2, partials=3, elements_per_part=20)
    for tensor, shard in zip(tensors[:6], whole(tensors[:6]), strict=True):
        rows.add(tensor, shard)
    rows.add_many(tensors[6:], whole(tensors[6:]))
    assert_rows(rows.end_step().result(), tensors)


def test_many_tensors_are_one_launch_per_dtype(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    launches = []
    launch_many = launch.launch_many
    monkeypatch.setattr(launch, "launch_many", lambda *args, **rest: launches.append(1) or launch_many(*args, **rest))
    tensors = numbers((30, 30), (5,), (0,), (7, 11), device=device)
    tensors.append(tensors[0].to(torch.bfloat16))
    rows = DeviceRows(device, elements_per_part=100)

    slots = rows.add_many(tensors, whole(tensors))

    assert slots == range(5)
    assert len(launches) == 2
    assert_rows(rows.end_step().result(), tensors)


def test_a_table_holds_while_tensors_look_the_same(device: torch.device) -> None:
    tensors = numbers((30, 30), (5,), device=device)
    rows = DeviceRows(device, elements_per_part=100)
    for step in range(3):
        for _ in range(step):  # the table's rows begin elsewhere in every step
            rows.add(tensors[1], Shard.whole((5,)))
        slots = rows.add_many(tensors, whole(tensors))
        assert_rows(rows.end_step().result()[slots.start : slots.stop], tensors)
        assert len(rows._tables) == 1
        tensors[0].add_(1.0)


def test_a_table_holds_when_a_tensor_has_moved(device: torch.device) -> None:
    rows, kept = DeviceRows(device), []
    for seed in range(5):
        tensors = numbers((30,), (5,), device=device, seed=seed)
        kept.append(tensors)
        rows.add_many(tensors, whole(tensors))
        assert_rows(rows.end_step().result(), tensors)
    assert len(rows._tables) == 1


def test_the_latest_tables_are_kept(device: torch.device) -> None:
    rows = DeviceRows(device)
    for length in range(1, 21):
        tensors = numbers((length,), device=device)
        rows.add_many(tensors, whole(tensors))
    rows.end_step()
    assert len(rows._tables) <= 16


def test_strided_tensors_among_many_keep_their_slots(device: torch.device) -> None:
    plain, wide, last = numbers((6,), (5, 8), (3, 3), device=device)
    tensors = [plain, wide.T, last, wide[:, ::2]]
    rows = DeviceRows(device)
    rows.add_many(tensors, whole(tensors))
    assert_rows(rows.end_step().result(), tensors)


def test_boxes_among_many(device: torch.device) -> None:
    plain, box, deep = numbers((6,), (5, 8), (2, 3, 2, 4), device=device)
    shards = [
        Shard.whole((6,)),
        Shard(shape=(5, 8), global_shape=(5, 80), offset=(0, 8)),
        Shard(shape=(2, 3, 2, 4), global_shape=(5, 6, 7, 8), offset=(1, 1, 1, 1)),
    ]
    rows = DeviceRows(device, elements_per_part=20)
    rows.add_many([plain, box, deep], shards)
    for row, tensor, shard in zip(rows.end_step().result(), [plain, box, deep], shards, strict=True):
        assert_equal_up_to_rounding(row, expected_summary(tensor, shard))


@pytest.mark.parametrize("spacing", [(1, 2), (2, 6), (4, 4)])
def test_rows_of_a_batch_that_ranks_take_in_turn(spacing: tuple[int, int], device: torch.device) -> None:
    (tensor,) = numbers((8, 70), device=device)
    shard = Shard.of_batch((8, 70), first=spacing[0], spacing=spacing)
    rows = DeviceRows(device, elements_per_part=100)
    rows.add(tensor, shard)
    (row,) = rows.end_step().result()
    assert_equal_up_to_rounding(row, expected_summary(tensor, shard))


def test_a_tensor_is_summarized_as_it_was_when_it_was_added(device: torch.device) -> None:
    (tensor,) = numbers((100,), device=device)
    before = tensor.clone()
    rows = DeviceRows(device)
    rows.add(tensor, Shard.whole((100,)))
    tensor.zero_()
    assert_rows(rows.end_step().result(), [before])


def test_a_tensor_in_a_graph_is_read_and_left_alone(device: torch.device) -> None:
    (tensor,) = numbers((10,), device=device)
    tensor.requires_grad_()
    product = tensor * 2
    rows = DeviceRows(device)
    rows.add(product, Shard.whole((10,)))
    product.sum().backward()
    assert tensor.grad is not None
    assert_rows(rows.end_step().result(), [product.detach()])


def test_what_the_kernel_reads(device: torch.device) -> None:
    tensor = torch.ones(2, device=device)
    assert reading.reads(tensor)
    assert reading.reads(torch.nn.Parameter(tensor))
    assert reading.reads(tensor.to(torch.float8_e5m2))
    assert not reading.reads(tensor.to(torch.complex64))
    assert not reading.reads(tensor.to(torch.uint64))
    assert not reading.reads(torch.ones(2, device="meta"))
    assert not reading.reads(torch.ones(2, 2, device=device).to_sparse())


def test_a_row_is_one_structured_summary() -> None:
    assert summary.SUMMARY.itemsize == 8 * WORDS
    assert np.array(summary.empty(3)).view(np.int64).reshape(3, WORDS).shape == (3, WORDS)


@pytest.mark.gpu
def test_work_on_several_streams_stays_in_order(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU has no streams")
    rows = DeviceRows(device, rows=2, partials=8, elements_per_part=1000)
    tensors = []
    for seed in range(12):
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            tensors += numbers((300, 300), device=device, seed=seed)
            rows.add(tensors[-1], Shard.whole((300, 300)))
    ticket = rows.end_step()
    assert_rows(ticket.result(), tensors)


@pytest.mark.gpu
def test_nothing_waits_for_the_device(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU has nothing to wait for")
    tensors = numbers((300, 300), (7,), device=device)
    rows = DeviceRows(device)
    rows.add_many(tensors, whole(tensors))
    rows.end_step().result()
    try:
        torch.cuda.set_sync_debug_mode("error")
        rows.add(tensors[0], Shard.whole((300, 300)))
        rows.add_many(tensors, whole(tensors))
        ticket = rows.end_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_rows(ticket.result(), [tensors[0], *tensors])


@pytest.mark.gpu
def test_a_device_without_a_number_is_the_current_one(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the CPU has no number")
    tensors = numbers((30,), device=device)
    rows = DeviceRows(torch.device("cuda"))
    rows.add_many(tensors, whole(tensors))
    assert_rows(rows.end_step().result(), tensors)
