"""Memory does not grow with the tensors: files of a gigabyte, which are holes, are compared in a fraction of it."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

MOST_BYTES = 600 << 20
"""Python, NumPy, LLVM and a few slabs of 4 MiB with intermediate arrays."""


def sparse(file: Path, shape: tuple[int, int], *, first: int) -> None:
    """A file of safetensors with one bfloat16 tensor: all zero, except for its first element."""
    size = 2 * shape[0] * shape[1]
    header = json.dumps({"weight": {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    with file.open("wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header + struct.pack("<H", first))
        opened.truncate(8 + len(header) + size)


@pytest.mark.parametrize(("other", "verdict"), [(0x3F80, "identical"), (0x4000, "diverged")])
def test_a_gigabyte_is_compared_in_a_few_slabs(tmp_path: Path, other: int, verdict: str) -> None:
    for name, value in (("a", 0x3F80), ("b", other)):
        sparse(tmp_path / f"{name}.safetensors", (1 << 14, 1 << 15), first=value)
    code = """
import re, sys, traindiff
result = traindiff.weights(*sys.argv[1:])
assert "torch" not in sys.modules
print(result.verdict, 1024 * int(re.search(r"VmHWM:\\s+([0-9]+)", open("/proc/self/status").read())[1]))
"""
    paths = [str(tmp_path / f"{name}.safetensors") for name in ("a", "b")]
    ended = subprocess.run(
        [sys.executable, "-c", code, *paths], timeout=250, check=True, stdout=subprocess.PIPE, text=True
    )

    said, most = ended.stdout.split()
    assert said == verdict
    assert int(most) < MOST_BYTES
