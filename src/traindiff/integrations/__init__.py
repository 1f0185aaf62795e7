"""Callbacks that record what the trainers of other libraries train: one module per library, which imports it."""
