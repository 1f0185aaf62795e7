"""Setups: the engine, dtype, optimizer and compiler under which a training is run."""
