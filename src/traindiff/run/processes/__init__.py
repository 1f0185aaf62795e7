"""Run a function on fresh processes, one per rank, and watch them until they end."""
