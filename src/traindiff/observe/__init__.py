"""See a training without disturbing it: hooks on a framework, and the session that writes what they see."""
