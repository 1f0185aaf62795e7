"""Record the trainings of the `Trainer` of Hugging Face's transformers.

```python
from traindiff.integrations.transformers import RecordingCallback

trainer = Trainer(model, args, train_dataset=data, callbacks=[RecordingCallback("runs/base")])
trainer.train()
```

`traindiff.compat.transformers.UnderflowOverflowCallback` watches for NaN and infinity instead, as
`--debug underflow_overflow` does.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn
from transformers import TrainerCallback

from traindiff.integrations.trainer_recording import TrainerRecording


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
