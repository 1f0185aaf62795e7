"""A training that is killed leaves every step that it had finished."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.observe.session.killed_training import main
from tests.storage.samples import content
from traindiff.storage import open_recording

ROOT = Path(__file__).parents[3]


def killed_after(path: Path, *, steps: int, seconds: float) -> int:
    """Start the training, kill it so long after so many steps; gives the last step that it had finished."""
    command = [sys.executable, "-m", "tests.observe.session.killed_training", str(path), "1000000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if int(line) == steps:
                break
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
    assert process.returncode == -signal.SIGKILL
    return max([steps, *(int(line) for line in rest if line.isdecimal())])


def test_every_finished_step_of_a_killed_training_can_be_read(tmp_path: Path) -> None:
    finished = [
        killed_after(tmp_path / f"killed-{number}", steps=number, seconds=seconds)
        for number, seconds in ((3, 0.0), (6, 0.013))
    ]
    main(str(tmp_path / "whole"), max(finished) + 2)
    whole = {step: (seen, numbers) for _, step, seen, numbers in content(tmp_path / "whole")}

    for path, last in zip(("killed-3", "killed-6"), finished, strict=True):
        recording = open_recording(str(tmp_path / path))
        steps = content(recording)
        assert [step for _, step, _, _ in steps] == list(range(len(steps)))
        assert len(steps) > last
        for _, step, seen, numbers in steps[:-1]:
            assert (seen, numbers) == whole[step]
        # The logged loss of the last step comes with the next one.
        _, step, seen, numbers = steps[-1]
        assert seen == whole[step][0][: len(seen)]
        assert numbers == whole[step][1][: len(numbers)]
        assert recording.status(0).ending in ("unclosed", "truncated")
        assert recording.status(0).message
        assert recording.rank_content(0)["optimizers"][0]["type"] == "AdamW"
