"""Steps that some ranks of a run have not recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from traindiff.findings.sentences import ranks_text
from traindiff.merging.step_table import Entry, Key


def without_missing_samples(
    table: Mapping[Key, Entry], missing: Sequence[int], *, pipelines: int | None = None
) -> dict[Key, Entry]:
    """The table of a step that some data-parallel ranks have not recorded: what they would have added is unknown.

    Args:
        table: The step.
        missing: Those ranks.
        pipelines: How many pipelines have a part of the batch each; None where ranks are no stages of pipelines.
            What a stage has is complete if as many ranks have it.
    """
    if not missing:
        return dict(table)
    who = ranks_text(missing, capital=False)
    reason = f"{who} did not record this step, so a part of the batch is missing"
    return {
        key: replace(entry, unobserved=reason)
        if (entry.batched or entry.summed)
        and (pipelines is None or len({part.rank for part in entry.parts}) < pipelines)
        else entry
        for key, entry in table.items()
    }
