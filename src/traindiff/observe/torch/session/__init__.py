"""The session around a PyTorch training: its targets, its taps, and the sink that they write to."""
