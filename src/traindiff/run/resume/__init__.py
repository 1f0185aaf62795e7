"""Resumes: train, save, load in a fresh process, and train on; compared with a training that never stopped."""
