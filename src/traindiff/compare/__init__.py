"""Two recordings to a verdict: align, measure, judge, say what it looks like. Needs no framework."""

import sys
from types import ModuleType
from typing import Any

from traindiff.compare.comparison import compare
from traindiff.compare.verdict import Comparison, Finding, SiteDifference, Unaligned

__all__ = ["Comparison", "Finding", "SiteDifference", "Unaligned", "compare"]


class _CallablePackage(ModuleType):
    """This package, callable as the function of its name.

    Importing anything of it makes Python set `traindiff.compare` to the package, wherever and whenever
    that happens; `traindiff.compare(baseline, candidate)` has to work all the same.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Comparison:
        return compare(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
