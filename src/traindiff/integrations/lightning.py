"""Record the trainings of Lightning's `Trainer`.

```python
from traindiff.integrations.lightning import RecordingCallback

trainer = Trainer(max_epochs=3, callbacks=[RecordingCallback("runs/base")])
trainer.fit(module, loader)
```

This works with `lightning` and `pytorch_lightning`, whichever the training has imported.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from traindiff.integrations.trainer_recording import TrainerRecording

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
