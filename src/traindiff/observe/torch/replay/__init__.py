"""Optimizers in float64: their formulas, bounds of their rounding, and mistakes that implementations make.

`formulas` has the table of optimizers. `rounded` computes a formula with a bound of its rounding. `mistakes` varies a
formula. `copied_range` holds what a step starts from. The tap `traindiff.observe.torch.hooks.optimizer_replay` uses
them.
"""
