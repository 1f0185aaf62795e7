"""Numbers of many ranks lie in temporary files, and are what was written to them."""

from __future__ import annotations

import gc
import mmap
import os
import threading

import numpy as np
import pytest

from traindiff.core.summary import SUMMARY, empty
from traindiff.storage import spilled
from traindiff.storage.spilled import SpilledNumbers

ROWS = 500

needs_files = pytest.mark.skipif(
    not (hasattr(mmap, "MADV_DONTNEED") and hasattr(os, "posix_fallocate")), reason="the system takes no pages back"
)


def numbered(numbers: SpilledNumbers, number: int, *, num_ranks: int) -> np.ndarray:
    """The summaries of a rank, with numbers of its own."""
    found = numbers.empty(ROWS, of=ROWS * num_ranks)
    found[:] = empty(ROWS)
    found["count"] = number * ROWS + np.arange(ROWS)
    found["sketch"] = number
    return found


@needs_files
def test_what_is_in_files_stays_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilled, "_CHUNK_BYTES", 3 * ROWS * SUMMARY.itemsize)  # several files
    numbers = SpilledNumbers()
    arrays = [numbered(numbers, number, num_ranks=1000) for number in range(10)]
    assert all(isinstance(one.base, memoryview) for one in arrays)
    numbers.give_back()  # as the thread does
    for number, one in enumerate(arrays):
        assert one["count"].tolist() == list(range(number * ROWS, (number + 1) * ROWS))
        assert (one["sketch"] == number).all()
        assert one.flags.writeable


@needs_files
def test_the_thread_ends_with_the_last_array() -> None:
    numbers = SpilledNumbers()
    array = numbered(numbers, 1, num_ranks=1000)
    (thread,) = [one for one in threading.enumerate() if one is numbers.thread]
    assert thread.daemon
    del array
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()
    again = numbered(numbers, 2, num_ranks=1000)
    assert numbers.thread is not None
    assert numbers.thread.is_alive()
    assert (again["sketch"] == 2).all()


@needs_files
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 warns of all forks beside threads
def test_a_process_that_was_forked_has_files_of_its_own() -> None:
    numbers = SpilledNumbers()
    before = numbered(numbers, 1, num_ranks=1000)
    child = os.fork()
    if not child:
        numbered(numbers, 7, num_ranks=1000)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    after = numbered(numbers, 2, num_ranks=1000)
    assert (before["sketch"] == 1).all()
    assert (after["sketch"] == 2).all()


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_few_numbers_stay_in_memory(num_ranks: int) -> None:
    assert SpilledNumbers().empty(ROWS, of=ROWS * num_ranks).base is None


def test_where_there_is_no_place_for_a_file_they_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(spilled.tempfile, "TemporaryFile", full)
    assert SpilledNumbers().empty(ROWS, of=ROWS * 1000).base is None
