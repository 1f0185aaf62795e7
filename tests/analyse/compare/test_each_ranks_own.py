"""What each rank rightly computes for itself is said beside the difference that it makes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.made_up import CONTENT, Compared, at

FC = ("forward", "", "fc", "output[0]")


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("BatchNorm2d", "BatchNorm2d takes the statistics of each rank's own samples; SyncBatchNorm takes those of"),
        ("Dropout", "Dropout draws other numbers where the batch is divided over ranks: compare with it turned off."),
        ("Linear", ""),
    ],
)
@pytest.mark.parametrize("divided", [2, 1])
def test_it_is_said_where_only_one_run_divides_the_batch(
    module: str, message: str, divided: int, compared: Compared
) -> None:
    run = {"mesh": {"data_parallel": divided, "engine": "DistributedDataParallel"}}
    content = {**CONTENT, "modules": {**CONTENT["modules"], "fc": module}}

    first = compared(at(FC, lambda values: values + np.float32(0.1)), run=run, content=content).first_divergence

    assert first is not None
    assert first.path == "fc"
    assert (message in first.message) if divided == 2 else ("rank" not in first.message)
