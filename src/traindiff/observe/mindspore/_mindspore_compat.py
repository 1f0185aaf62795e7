"""Every private name of MindSpore that traindiff uses, each with the reason; a test finds those that are elsewhere."""

from __future__ import annotations

from mindspore.common.api import _pynative_executor


def records_gradients() -> bool:
    """True while MindSpore records what Python computes, to differentiate it. There is no public way to ask."""
    return bool(_pynative_executor.requires_grad())
