"""Results in the terminal."""
