"""Trainings of other people's design, their legal variations and their faults: what traindiff says of each."""
