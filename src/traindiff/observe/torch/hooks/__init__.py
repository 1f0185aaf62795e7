"""One observed kind of thing per file. A tap only reads, and leaves no trace when it is removed.

A file with `attach(context)` is a tap; `traindiff.core.tap_registry` lists them in the order in which they are
attached. A tap gets a `context`, hands tensors to a `sink`, and asks `progress` where the training is. The taps of an
optimizer are attached to each one: `optimizer_step` and `optimizer_replay` (its formulas: `replay_formulas`). Several
taps use `activations`, `batch_axis`, `nested` and `optimizers`; functions without hooks: `listeners`, `loss_scale`,
`gradient_stages`; compiled code: `compiled`.
"""

from __future__ import annotations
