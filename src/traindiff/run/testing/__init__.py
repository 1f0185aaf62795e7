"""`traindiff.testing`: assertions and golden recordings for tests of trainings."""
