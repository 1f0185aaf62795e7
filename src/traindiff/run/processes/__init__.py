"""Launching: a function on fresh processes, one per rank, watched until they end, whichever way."""
