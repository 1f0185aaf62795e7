"""From recordings to verdicts. Needs no framework, and imports nothing of `observe`."""
