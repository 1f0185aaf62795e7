"""Which gradients of a recording have signs that can be put together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from traindiff.analyse.signs import run_signs
from traindiff.core.kernels import summarize
from traindiff.core.kernels.torch_arrays import detail_of
from traindiff.core.observation import Observation
from traindiff.core.shards import Shard
from traindiff.storage import RecordingWriter, open_recording

RUN = {"world_size": 1, "mesh": None, "created": "", "command": [], "settings": {"observe": ["grad"], "every": 1}}


@pytest.mark.parametrize(
    ("shard", "found"), [(Shard.whole((2, 3)), ["w"]), (Shard.of_batch((2, 3), first=0), [])], ids=["whole", "batched"]
)
def test_a_gradient_with_a_batch_axis_has_no_size_and_no_signs(shard: Shard, found: list[str], tmp_path: Path) -> None:
    """Training writes none, but a stranger's recording may hold one."""
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = Observation(
        phase="grad", stage="", path="w", slot="grad", call=0, step=0, micro_step=0, order=0, dtype="float32",
        merge="sum", shard=shard, optimizer="",
    )  # fmt: skip
    writer = RecordingWriter(str(tmp_path / "run"), run=RUN)
    tensor = torch.from_numpy(values)
    detail = detail_of(tensor, ["signs"])
    assert detail is not None
    writer.write_step([seen], np.stack([summarize(tensor, shard=shard)]), {0: detail})
    writer.close()

    (step,) = run_signs(open_recording(str(tmp_path / "run")))
    assert list(step.shapes) == found
    assert [step.read(path)[0].size for path in found] == [6] * len(found)
