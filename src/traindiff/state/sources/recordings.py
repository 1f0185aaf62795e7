"""The parameters of a recording, by their summaries alone: as they were after its last step, or before its first."""

from __future__ import annotations

from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.merge.site import MergedSite
from traindiff.errors import CheckpointError
from traindiff.state.dtypes import ITEM_BYTES
from traindiff.state.stored import Role, StoredTensor
from traindiff.storage import open_recording


def of_recording(path: str) -> tuple[dict[str, StoredTensor], list[str]]:
    """Parameters and the optimizer's state by name, and notes.

    Raises:
        CheckpointError: It has none, because they were not recorded, or no step was taken.
        RecordingError: The recording is damaged.
    """
    latest: dict[tuple[str, str], tuple[int, MergedSite]] = {}
    has_steps = False
    for step in run_steps(open_recording(path)):
        has_steps = True
        for key, site in step.table.items():
            is_value = key.phase == "param" and key.slot == "value" and key.stage in ("", "before")
            is_state = key.phase == "optimizer" and bool(site.shape)
            if (is_value or is_state) and not site.unobserved and site.exact and site.dtype in ITEM_BYTES:
                latest[key.path, "" if is_value else key.slot] = step.step, site.without_parts()
        step.release()
    if not has_steps:
        raise CheckpointError(
            f"{path} is a recording without steps, so there are no parameters in it. Give one of a training that took "
            "a step of its optimizer, or saved weights."
        )
    if not latest:
        raise CheckpointError(
            f'{path} is a recording without parameters. Record with observe=[..., "parameters"] to compare them.'
        )
    found: dict[str, StoredTensor] = {}
    for (name, state), (_, site) in latest.items():
        full, role = _named(name, state)
        found[full] = StoredTensor(name=full, dtype=site.dtype, shape=site.shape, role=role, summary=site.summary)
    steps = sorted({number for number, _ in latest.values()})
    note = f"{path} is a recording: parameters are those of step {steps[-1]}, and only their summaries are known."
    return found, [note]


def _named(name: str, state: str) -> tuple[str, Role]:
    return (f"optimizer.state.{name}.{state}", "optimizer") if state else (name, "parameter")
