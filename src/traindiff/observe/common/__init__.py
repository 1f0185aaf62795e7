"""The parts of a session that need no framework."""
