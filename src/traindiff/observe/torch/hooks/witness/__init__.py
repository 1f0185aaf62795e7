"""The witness: each gradient is checked against what inputs and gradients of outputs give."""

from traindiff.observe.torch.hooks.witness.tap import attach

__all__ = ["attach"]
