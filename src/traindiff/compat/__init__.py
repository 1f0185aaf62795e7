"""Names under which other tools' users know what traindiff does: same arguments, same output."""

from __future__ import annotations
