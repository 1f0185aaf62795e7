"""The gradient monitor of msprobe: its configuration, its calls and its files (traindiff explain gradient-monitor).

from traindiff.compat.msprobe import GradComparator, PrecisionDebugger

Importing it imports no framework; comparing needs none.
"""

from __future__ import annotations

from traindiff.compat.msprobe.comparator import GradComparator
from traindiff.compat.msprobe.debugger import PrecisionDebugger

__all__ = ["GradComparator", "PrecisionDebugger"]
