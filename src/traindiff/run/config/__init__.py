"""Setups: the engine, dtype, optimizer and compiler under which a training runs, and how each engine is built."""
