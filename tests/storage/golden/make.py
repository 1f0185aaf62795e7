"""Write the golden recording of the current format version: `python -m tests.storage.golden.make`.

Only for a new version. The recordings of versions that were released are never written again.
"""

from __future__ import annotations

from pathlib import Path

from tests.storage.samples import RUN, observation, step, summaries
from traindiff.core.shards import Shard
from traindiff.storage import RecordingWriter
from traindiff.storage.manifest import FORMAT_VERSION


def make(path: Path) -> None:
    writer = RecordingWriter(str(path), run=RUN)
    writer.write_rank({"model": "Sample", "parameters": {"layer.0": {"shape": [4, 6], "dtype": "bfloat16"}}})
    for number in range(2):
        writer.write_step(*step(number))
    batched = Shard.of_batch((2, 8), first=4)
    odd = [
        observation(step=2, phase="loss", path="loss", slot="logged", merge="mean", weight=3.5, shard=Shard.whole(())),
        observation(step=2, shard=batched, micro_step=1, call=2, factor=8.0, stage="recomputed", term=3, scaled=True),
        observation(step=2, dtype="", unobserved="layout sparse_coo has no dense elements", path="größe"),
    ]
    writer.write_step(odd, summaries(3, seed=9))
    writer.close()


if __name__ == "__main__":
    make(Path(__file__).parent / f"version-{FORMAT_VERSION}")
