"""Resumes."""
