"""Trainings under MindSpore; `make test-mindspore` runs them, where it and an older NumPy are installed."""
