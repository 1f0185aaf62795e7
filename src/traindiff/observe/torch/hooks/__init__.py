"""One observed kind of thing per file. A tap only reads, and leaves no trace when it is removed.

A file with `attach(context)` is a tap; `traindiff.core.tap_registry` lists them in the order in which they are attached.
What they are given is `context`, what they hand tensors to is `sink`, and where the training is, `progress` knows
(`batch`, `chunk`). The optimizers' taps are attached to each optimizer: `optimizer_step`, `optimizer_replay` (`replay`
has the formulas), found by `optimizer_discovery`. What several taps use: `activations`, `batch_axis`, `nested`,
`pieces`; functions without hooks: `listeners`, `loss_scaler`, `clipping`; compiled code: `compiled`.
"""

from __future__ import annotations
