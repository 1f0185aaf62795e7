"""Taps, kernels and a sink put together around a training."""
