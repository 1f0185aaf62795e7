"""Record the trainings of Lightning's `Trainer`.

```python
from traindiff.integrations.lightning import RecordingCallback

trainer = Trainer(max_epochs=3, callbacks=[RecordingCallback("runs/base")])
trainer.fit(module, loader)
```

`training` makes a recipe of a trainer, for `traindiff resume`: does it go on as if it had never stopped?

This works with `lightning` and `pytorch_lightning`, whichever the training has imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traindiff.integrations.stepping import Stepping
from traindiff.integrations.trainer_recording import TrainerRecording

if TYPE_CHECKING:
    from traindiff.run.config.training import Training

_PACKAGE = "pytorch_lightning" if "pytorch_lightning" in sys.modules else "lightning.pytorch"

_Callback: Any = import_module(_PACKAGE).Callback


class RecordingCallback(_Callback):  # type: ignore[misc]  # one of two classes, known when this is imported
    """Records a training from its first step to its last, under any strategy of the trainer.

    Paths are those of the `LightningModule`. Each optimizer counts its own steps. Forward and backward passes belong to
    the steps of the optimizer that steps first. Validation is recorded only with `evaluation=True`. If a training with
    one optimizer continues from a checkpoint, step numbering continues too.

    Args:
        path: Directory to write.
        **settings: Settings of `traindiff.record`, e.g. `every=10`.

    Raises:
        ConfigError: A setting is wrong.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Any) -> None:
        self._recording = TrainerRecording(path, settings)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach the taps."""
        first_step = trainer.global_step if len(trainer.optimizers) == 1 else 0
        self._recording.begin(pl_module, first_step=first_step, calls_parts=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Complete the recording."""
        self._recording.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Complete the recording with the steps so far."""
        self._recording.end()


def training(trainer: Any, module: Any, *data: Any) -> Training:
    """A training whose steps, saving and loading are those of Lightning's `Trainer`, for `traindiff resume`.

    ```python
    from traindiff.integrations.lightning import training


    def recipe():
        return training(Trainer(max_steps=100), module, loader)
    ```

    `max_steps`, or the epochs, must reach further than the steps that are tested. It is saved by
    `trainer.save_checkpoint`, and resumes as `trainer.fit(..., ckpt_path=...)` does. A batch is a step, so it is for
    automatic optimization without accumulation. One process only.
    """
    from traindiff.run.config.training import Training

    pauses = _Pauses()
    trainer.callbacks.append(pauses)
    configured = module.configure_optimizers()
    module.configure_optimizers = lambda: configured  # the ones that are recorded are those that step

    def begin(checkpoint: str | None = None) -> None:
        pauses.stepping.start(lambda: trainer.fit(module, *data, ckpt_path=checkpoint))

    def step(_: int) -> None:
        pauses.stepping.step(begin)

    def save(directory: Path) -> None:
        trainer.save_checkpoint(directory / "saved.ckpt")

    def load(directory: Path) -> Iterator[int]:
        begin(str(directory / "saved.ckpt"))
        return count()

    return Training(
        model=module, optimizer=None, batches=count(), step=step, save=save, load=load,
        state={"configured": configured},
    )  # fmt: skip


class _Pauses(_Callback):  # type: ignore[misc]  # one of two classes, known when this is imported
    """Pauses a trainer before its first batch, and after each batch."""

    def __init__(self) -> None:
        self.stepping = Stepping()
        self._begun = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Pause before the first batch, when everything was loaded."""
        if not self._begun:
            self._begun = True
            self.stepping.pause()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Pause after a batch."""
        self.stepping.pause()
