"""Use traindiff in tests: `assert_equivalent`, and golden recordings for pytest (docs/testing.md)."""

from traindiff.run.testing.equivalence import assert_equivalent
from traindiff.run.testing.golden import Golden

__all__ = ["Golden", "assert_equivalent"]
