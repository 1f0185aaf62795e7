"""Taps: each observes one kind of thing. A tap only reads, and leaves no trace when it is removed.

A file with `attach(context)` is a tap; `traindiff.core.tap_registry` lists the taps in the order in which they are
attached. A tap gets a `context`, hands tensors to a `sink`, and asks `progress` where the training is. The taps of an
optimizer are attached to each one: `optimizer_step` and `optimizer_replay` (its formulas: the package `replay`).
Several taps use `activations`, `nested`, `followed_modules` and `inert_on_copy`; taps of functions without hooks
replace these by `traindiff.observe.common.listeners`; `compiled` observes compiled code.
"""

from __future__ import annotations
