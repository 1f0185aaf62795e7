"""Trainings that traindiff can run itself: run, measured, verified."""
