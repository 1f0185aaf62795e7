"""A `.npy` file of a stranger: nothing is made before the header fits the file."""

from __future__ import annotations

import io
import re
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traindiff.compat.msprobe.importing import booleans


def saved(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def with_header(text: str, content: bytes = b"", *, length: int | None = None) -> bytes:
    data = text.encode("latin-1")
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(data) if length is None else length) + data + content


@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3)])
def test_what_numpy_writes_is_read(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).random(shape) > 0.5

    np.testing.assert_array_equal(booleans(saved(array)), array)
    np.testing.assert_array_equal(booleans(saved(np.asfortranarray(array))), array)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "cannot be read as an array"),
        (b"PK\x03\x04" + bytes(40), "cannot be read as an array"),
        (saved(np.zeros(3)), "holds '<f8' and not bool"),
        (saved(np.array([None], object)), "holds '|O' and not bool"),
        (saved(np.zeros(3, bool))[:-1], "has the shape"),
        (with_header("{'descr': '|b1', 'fortran_order': False, 'shape': (10000000000000,)}"), "10000000000000"),
        (with_header("{'descr': '|b1', 'fortran_order': False, 'shape': (-1,)}"), "has no shape"),
        (with_header("{'descr': '|b1', 'fortran_order': False, 'shape': (True,)}", b"\1"), "has no shape"),
        (with_header("{'descr': '|b1', 'fortran_order': False, 'shape': 3}"), "has no shape"),
        (with_header("{'descr': '|b1'}"), "cannot be read as an array"),
        (with_header("(" * 2000), "cannot be read as an array"),
        (with_header("[[" * 500 + "1L"), "cannot be read as an array"),
        (with_header("__import__('os')"), "cannot be read as an array"),
        (with_header("\x00"), "cannot be read as an array"),
        (with_header("{}", length=60_000), "header of 60000 bytes"),
    ],
)
def test_what_is_no_whole_array_of_booleans_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        booleans(data)


@given(st.integers(0, 200), st.binary(max_size=8))
def test_garbled_files_are_read_or_refused(place: int, garbage: bytes) -> None:
    data = saved(np.zeros((4, 6), bool))
    with suppress(ValueError):
        booleans(data[:place] + garbage + data[place + len(garbage) :])
