"""Settings that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

try:
    from hypothesis import settings
except ModuleNotFoundError:  # tests/no_torch need nothing but pytest
    pass
else:
    # The same examples on every run, so that a red build is red again on the next machine.
    settings.register_profile("default", deadline=None, derandomize=True, max_examples=50)
    # HYPOTHESIS_PROFILE=explore looks for new ones.
    settings.register_profile("explore", deadline=None, max_examples=2000)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="module", params=["reference", "compiled"])
def kernel(request: pytest.FixtureRequest) -> Iterator[str]:
    """Have `traindiff.kernels.summarise` use the NumPy reference, or the compiled kernel for the CPU."""
    from traindiff import kernels

    with pytest.MonkeyPatch.context() as patched:
        if request.param == "reference":
            patched.setattr(kernels, "_cpu_kernel", lambda: None)
        elif kernels._cpu_kernel() is None:
            pytest.skip("llvmlite is not installed")
        yield request.param
