"""How fast `traindiff weights` reads, and in how much memory: `python benchmarks/weights.py [DIRECTORY [--speeds]]`.

Part 1 holds two comparisons against the file system's own sequential read of both files, by one thread: from the page
cache (read before) and past it (its pages are dropped before each run; needs a file system that honors
POSIX_FADV_DONTNEED). Both files of safetensors hold the same random numbers. With the same names, elements are compared
side by side; with other names, tensors are found by their summaries. Part 2 (left out with `--speeds`) compares two
sharded checkpoints with the shapes of Llama 70B in bfloat16; their files are holes except for the first element of each
tensor. Memory is the peak of the process.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

GIGABYTE = 10**9
RUNS = 5
ROWS, COLUMNS = 4096, 4096
LAYERS_70B = 80


def tensors(dtype: str, size: int, layers: str) -> Iterator[tuple[str, tuple[int, int], int]]:
    """Names, shapes and bytes of matrices that take about a given size together."""
    each = ROWS * COLUMNS * (4 if dtype == "F32" else 2)
    return ((f"{layers}.{number}.weight", (ROWS, COLUMNS), each) for number in range(size // each))


def header(held: list[tuple[str, tuple[int, ...], int]], dtype: str) -> bytes:
    """The beginning of a file of safetensors."""
    content, place = {}, 0
    for name, shape, size in held:
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text


def write_random(file: Path, dtype: str, size: int, *, layers: str = "layers") -> None:
    """A file of random numbers: finite ones, of the size of weights."""
    draw = np.random.default_rng(0)
    held = list(tensors(dtype, size, layers))
    with file.open("wb") as opened:
        opened.write(header(held, dtype))
        for _, shape, _ in held:
            values = 0.02 * draw.standard_normal(shape, dtype=np.float32)
            opened.write((values if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)).tobytes())


def read_whole(files: list[Path]) -> None:
    """Read files from their beginning to their end, in slabs of 16 MiB."""
    slab = bytearray(1 << 24)
    for file in files:
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(slab):
                pass


def drop(files: list[Path]) -> None:
    """Drop the pages of files from the page cache."""
    for file in files:
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def timed(work: Callable[[], object], before: Callable[[], object]) -> tuple[float, float]:
    """Seconds and CPU seconds of a run."""
    before()
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def speeds(directory: Path, dtype: str, size: int) -> None:
    """Print how fast both are read, and compared, with and without the page cache; the two in turns."""
    import traindiff

    files = [directory / f"{dtype}-{side}.safetensors" for side in ("a", "same", "renamed")]
    write_random(files[0], dtype, size)
    shutil.copyfile(files[0], files[1])
    write_random(files[2], dtype, size, layers="blocks")
    for what, pair in (("same names", files[:2]), ("other names", files[::2])):
        total = sum(file.stat().st_size for file in pair) / GIGABYTE
        traindiff.weights(*pair)  # compiles its kernels
        for cache, before in (("page cache", lambda: None), ("dropped", lambda pair=pair: drop(pair))):
            rows = [
                (
                    *timed(lambda pair=pair: read_whole(pair), before),
                    *timed(lambda pair=pair: traindiff.weights(*pair), before),
                )
                for _ in range(RUNS)
            ]
            read, read_cpu, compared, cpu = (median(column) for column in zip(*rows, strict=True))
            share = median(one[0] / one[2] for one in rows)
            cpu_share = median(one[1] / one[3] for one in rows)
            print(
                f"{dtype}, {what}, {cache}: read {total / read:.2f} GB/s ({read_cpu / total:.3f} s CPU per GB), "
                f"compared {total / compared:.2f} GB/s ({cpu / total:.3f} s CPU per GB), {share:.0%} of reading "
                f"({cpu_share:.0%} by CPU time)",
                flush=True,
            )
    for file in files:
        file.unlink()


def write_70b(directory: Path, first: int) -> Path:
    """A sharded checkpoint with the shapes of Llama 70B; its files are holes."""
    shapes = {"self_attn.q_proj": (8192, 8192), "self_attn.k_proj": (1024, 8192), "self_attn.v_proj": (1024, 8192),
              "self_attn.o_proj": (8192, 8192), "mlp.gate_proj": (28672, 8192), "mlp.up_proj": (28672, 8192),
              "mlp.down_proj": (8192, 28672)}  # fmt: skip
    ends = {"model.embed_tokens.weight": (128256, 8192), "lm_head.weight": (128256, 8192), "model.norm.weight": (8192,)}
    shards: list[dict[str, tuple[int, ...]]] = [dict(ends)]
    for layer in range(LAYERS_70B):
        here = f"model.layers.{layer}"
        shards.append({f"{here}.{name}.weight": shape for name, shape in shapes.items()})
        shards[-1].update({f"{here}.{name}_layernorm.weight": (8192,) for name in ("input", "post_attention")})
    directory.mkdir()
    index, value = {}, first
    for number, shard in enumerate(shards):
        name = f"model-{number:05}.safetensors"
        held = [(tensor, shape, 2 * int(np.prod(shape))) for tensor, shape in shard.items()]
        with (directory / name).open("wb") as opened:
            opened.write(header(held, "BF16"))
            for _, _, size in held:
                value += 1
                place = opened.tell()
                opened.write(struct.pack("<H", 0x3F80 + value % 0x100))
                opened.seek(place + size)
            opened.truncate()
        index.update(dict.fromkeys(shard, name))
    file = directory / "model.safetensors.index.json"
    file.write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return file


def main() -> None:
    """Print all figures."""
    if sys.argv[1:2] == ["--compare"]:
        import traindiff

        began = time.perf_counter()
        result = traindiff.weights(*sys.argv[2:4])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        seconds, cpu = time.perf_counter() - began, time.process_time()
        print(
            f"70 B: {result.verdict}, {result.num_bytes / GIGABYTE:.0f} GB in {seconds:.0f} s ({cpu:.0f} s CPU), "
            f"peak memory {peak / GIGABYTE:.2f} GB"
        )
        return
    given = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory(dir=given) as name:
        directory = Path(name)
        for dtype in ("F32", "BF16"):
            speeds(directory, dtype, GIGABYTE)
        if sys.argv[2:3] == ["--speeds"]:
            return
        indices = [str(write_70b(directory / side, 0)) for side in "ab"]
        subprocess.run([sys.executable, __file__, "--compare", *indices], check=True)


if __name__ == "__main__":
    main()
