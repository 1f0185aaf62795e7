"""Lockstep: two engines trained on the same batches in one process per rank, and compared while they train."""
