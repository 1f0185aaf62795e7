"""One run's recording to whole steps: one entry per site, merged over ranks, shards and micro-steps."""
