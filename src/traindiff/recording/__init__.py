"""Observations to disk and back. The format is defined in FORMAT.md beside this file."""

from traindiff.recording.ended import Ended, ended
from traindiff.recording.gap import Gap
from traindiff.recording.reader import Recording, open_recording
from traindiff.recording.run import Run
from traindiff.recording.stream import RankStatus, StepObservations
from traindiff.recording.writer import RecordingWriter

__all__ = [
    "Ended",
    "Gap",
    "RankStatus",
    "Recording",
    "RecordingWriter",
    "Run",
    "StepObservations",
    "ended",
    "open_recording",
]
