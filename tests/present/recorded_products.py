"""A made-up run that has recorded matrix products: right ones, a wrong one, and some that were not checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.made_up import CONTENT, Edit, Seen, Step, record
from traindiff.core.site import PHASES

ATTENTION = "not checked: its products are inside the kernel, which does not return the attention weights"

_LINE = {"file": "model.py", "line": 12, "function": "forward", "code": "x = self.fc(x) | self.gate(x)"}
_FORMAT = {"format": "bfloat16 x bfloat16 -> bfloat16", "terms": 64}
CALLED: dict[str, Any] = {
    "forward": {
        "fc/aten.addmm[0]": {"settings": {}, "source": _LINE, "products": {"output[0]": _FORMAT}},
        "fc/aten._scaled_dot_product_flash_attention[0]": {"settings": {}, "source": _LINE},
    },
    "backward": {
        "fc/aten.convolution_backward[0]": {
            "settings": {}, "node": "ConvolutionBackward0", "of": "fc/aten.convolution[0]",
            "products": dict.fromkeys(("output[0]", "output[1]"), _FORMAT),
        },
    },
}  # fmt: skip


def product(
    sites: Step, path: str, residuals: list[float], *, phase: str = "forward", output: str = "output[0]"
) -> None:
    """Add the check of a product, whose rows have these errors."""
    rows = np.array(residuals)
    row = float(np.argmax(rows))
    numbers = {"residual": rows, "error": 2e-3, "allowed": 4e-3, "row": row, "median": float(np.median(rows))}
    for name, value in numbers.items():
        sites[phase, "product", path, f"{output}.{name}"] = Seen(values=np.asarray(value, dtype=np.float64))


def right(step: int, sites: Step) -> None:
    product(sites, "fc/aten.addmm[0]", [0.5, 0.75 + 0.01 * step, 0.25])
    site = ("forward", "product", "fc/aten._scaled_dot_product_flash_attention[0]", "residual")
    sites[site] = Seen(values=np.zeros(0), about={"unobserved": ATTENTION})
    for output in ("output[0]", "output[1]"):
        product(sites, "fc/aten.convolution_backward[0]", [0.1, 0.2], phase="backward", output=output)


def wrong(step: int, sites: Step) -> None:
    """The first row of one product is far off, in step 1."""
    right(step, sites)
    if step == 1:
        product(sites, "fc/aten.addmm[0]", [1000.0, 0.5, 0.5])


def with_products(path: Path, edit: Edit = right) -> str:
    """The path of a run with products."""
    observe = [*PHASES, "products"]
    return str(record(path, edit, content={**CONTENT, "products": CALLED}, recorded={"observe": observe}))
