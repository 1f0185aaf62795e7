"""What `run.json` and `rank.json` must say: the keys that readers use, and their types."""

from __future__ import annotations

from traindiff.untrusted import (
    ANYTHING,
    FLAG,
    NUMBER,
    TEXT,
    Demand,
    listed,
    mapped,
    nullable,
    shaped,
    whole,
)

MOST_RANKS = 1 << 17
"""Ranks of a run at most."""

_COUNT = whole(0)
_LENGTH = whole(0)

_MESH = nullable(
    shaped(
        {},
        {
            "data_parallel": whole(1, MOST_RANKS),
            "engine": nullable(TEXT),
            "pipeline": whole(1, MOST_RANKS),
            "schedule": TEXT,
            "micro_batches": nullable(_COUNT),
            "scales_gradients": nullable(FLAG),
        },
    )
)

RUN: Demand = shaped(
    {
        "format": TEXT,
        "version": whole(1),
        "world_size": whole(1, MOST_RANKS),
        "settings": shaped(
            {},
            {
                "observe": listed(TEXT),
                "select": listed(TEXT),
                "detail": listed(TEXT),
                "bounds": listed(NUMBER),
                "steps": nullable(TEXT),
                "ranks": nullable(listed(whole(0, MOST_RANKS - 1))),
                "every": whole(1),
                "batch_axis": mapped(ANYTHING),
                "sample_order": TEXT,
                "shards": listed(TEXT),
                "operators": listed(TEXT),
                "evaluation": FLAG,
                "replica": nullable(TEXT),
            },
        ),
    },
    {
        "mesh": _MESH,
        "engine": nullable(
            shaped(
                {},
                {
                    "name": nullable(TEXT),
                    "zero_stage": nullable(NUMBER),
                    "gradient_clipping": nullable(NUMBER),
                    "optimizer": nullable(TEXT),
                    "decoupled_weight_decay": nullable(FLAG),
                    "asked_for": nullable(TEXT),
                },
            )
        ),
        "forced_by": nullable(TEXT),
        "recipe": nullable(TEXT),
        "created": TEXT,
        "command": listed(TEXT),
        "versions": mapped(nullable(TEXT)),
        "environment": shaped({}, {"framework": TEXT}),
        "source": mapped(ANYTHING),
    },
)
"""What a `run.json` of the current version must be."""

_TENSORS = mapped(shaped({}, {"shape": listed(_LENGTH), "dtype": TEXT, "requires_grad": FLAG}))

_CALLED = shaped(
    {},
    {
        "source": nullable(
            shaped({}, {"file": TEXT, "line": nullable(_COUNT), "function": TEXT, "code": TEXT}),
        ),
        "settings": mapped(TEXT),
        "node": nullable(TEXT),
        "of": nullable(TEXT),
    },
)

RANK: Demand = shaped(
    {},
    {
        "model": TEXT,
        "modules": mapped(TEXT),
        "parameters": _TENSORS,
        "buffers": _TENSORS,
        "tied": mapped(TEXT),
        "optimizers": listed(shaped({"name": TEXT, "type": TEXT, "groups": listed(listed(TEXT))})),
        "world_size": whole(1, MOST_RANKS),
        "mesh": _MESH,
        "pid": _COUNT,
        "pipeline": shaped(
            {
                "num_stages": whole(1, MOST_RANKS),
                "stages": listed(whole(0, MOST_RANKS - 1), least=1),
                "ranks": listed(whole(0, MOST_RANKS - 1)),
            }
        ),
        "operators": mapped(mapped(_CALLED)),
        "not_forced": mapped(TEXT),
    },
)
"""What a `rank.json` must be."""
