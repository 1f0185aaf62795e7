"""The same tests on a GPU, and everywhere in Triton's interpreter.

Whether Triton interprets is decided once per process, when it is imported. So `test_interpreter` runs
these tests in a process of their own; here they run on a GPU, or are skipped.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

_has_triton = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if _has_triton else ["test_*.py"]


@pytest.fixture(scope="session", params=["interpreter" if INTERPRETED else pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "interpreter":
        with np.errstate(all="ignore"):  # the interpreter computes in NumPy
            yield torch.device("cpu")
    elif torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
    else:
        pytest.skip("needs a GPU; without one, test_interpreter runs this in Triton's interpreter")
