"""Trainings that traindiff runs itself, records, measures and verifies."""
