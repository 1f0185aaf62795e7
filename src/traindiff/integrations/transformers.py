"""Record the trainings of the `Trainer` of Hugging Face's transformers.

```python
from traindiff.integrations.transformers import RecordingCallback

trainer = Trainer(model, args, train_dataset=data, callbacks=[RecordingCallback("runs/base")])
trainer.train()
```

`training` makes a recipe of a trainer, for `traindiff resume`: does it go on as if it had never stopped?

`traindiff.compat.transformers.UnderflowOverflowCallback` watches for NaN and infinity instead, as
`--debug underflow_overflow` does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import TrainerCallback

from traindiff.integrations.stepping import Stepping
from traindiff.integrations.trainer_recording import TrainerRecording

if TYPE_CHECKING:
    from traindiff.run.config.training import Training


class RecordingCallback(TrainerCallback):  # type: ignore[misc]  # the library is not there for every type check
    """Records a training from its first step to its last, with any engine that the trainer prepares the model for.

    Evaluation is recorded only with `evaluation=True`. A training that continues from a checkpoint keeps the numbers
    of its steps.

    Args:
        path: Directory to write.
        **settings: Settings of `traindiff.record`, e.g. `every=10`.

    Raises:
        ConfigError: A setting is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        self._recording = TrainerRecording(path, settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:  # noqa: ARG002
        """Attach the taps."""
        self._recording.begin(model, first_step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Complete the recording."""
        self._recording.end()


def training(trainer: Any) -> Training:
    """A training whose steps, saving and loading are those of a `Trainer`, for the recipe of `traindiff resume`.

    ```python
    from traindiff.integrations.transformers import training


    def recipe():
        return training(Trainer(model, args, train_dataset=data))
    ```

    `max_steps`, or the epochs, must reach further than the steps that are tested. The trainer saves with its own
    checkpoints, and resumes as `trainer.train(resume_from_checkpoint=...)` does. One process only.
    """
    from traindiff.run.config.training import Training

    pauses = _Pauses()
    trainer.add_callback(pauses)
    trainer.create_optimizer()

    def begin(checkpoint: str | None = None) -> None:
        pauses.stepping.start(lambda: trainer.train(resume_from_checkpoint=checkpoint))

    def step(_: int) -> None:
        pauses.stepping.step(begin)

    def save(directory: Path) -> None:
        pauses.save_into(directory)
        pauses.stepping.advance()

    def load(directory: Path) -> Iterator[int]:
        (checkpoint,) = directory.glob("checkpoint-*")
        begin(str(checkpoint))
        return count()

    return Training(model=trainer.model, optimizer=trainer.optimizer, batches=count(), step=step, save=save, load=load)


class _Pauses(TrainerCallback):  # type: ignore[misc]  # the library is not there for every type check
    """Pauses a trainer before its first step, after each step, and after saving."""

    def __init__(self) -> None:
        self.stepping = Stepping()
        self._directory: Path | None = None
        self._begun = False

    def save_into(self, directory: Path) -> None:
        """Save when the trainer goes on."""
        self._directory = directory

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Pause before the first step, when everything was loaded."""
        if not self._begun:
            self._begun = True
            self.stepping.pause()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Pause after a step; the trainer saves next if it is asked to."""
        self.stepping.pause()
        if self._directory is not None:
            args.output_dir = str(self._directory)
            control.should_save = True

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """Pause after saving."""
        if self._directory is not None:
            self._directory = None
            self.stepping.pause()
