"""Observations to disk and back. The format is defined in FORMAT.md beside this file."""

from traindiff.storage.following import Follower, not_following, open_followed
from traindiff.storage.gap import Gap
from traindiff.storage.manifest import Ended, Joined, ended, joined
from traindiff.storage.places import Places
from traindiff.storage.reader import Recording, Run, open_recording, read_in_turns
from traindiff.storage.shifted import ShiftedRecording
from traindiff.storage.stream import RankStatus, StepObservations
from traindiff.storage.writer import RecordingWriter

__all__ = [
    "Ended",
    "Follower",
    "Gap",
    "Joined",
    "Places",
    "RankStatus",
    "Recording",
    "RecordingWriter",
    "Run",
    "ShiftedRecording",
    "StepObservations",
    "ended",
    "joined",
    "not_following",
    "open_followed",
    "open_recording",
    "read_in_turns",
]
