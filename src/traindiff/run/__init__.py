"""Run trainings: scripts as they are, recipes under several engines, two engines in lockstep, and the demo."""
