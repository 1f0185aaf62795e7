"""What an optimizer should do: `formulas` in float64, `rules` says whose is whose, `variants` are known mistakes."""
