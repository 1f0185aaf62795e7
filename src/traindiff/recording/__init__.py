"""Observations to disk and back. The format is defined in FORMAT.md beside this file."""

from traindiff.recording.reader import RankStatus, Recording, StepObservations, open_recording
from traindiff.recording.writer import RecordingWriter

__all__ = ["RankStatus", "Recording", "RecordingWriter", "StepObservations", "open_recording"]
