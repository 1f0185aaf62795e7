"""The table of a step by its plan is the one that is made without a plan, bit for bit."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.made_up import CONTENT, record, summary_of
from traindiff.analyse.merge.rank_steps import rank_steps
from traindiff.analyse.merge.run_steps import RunStep, StepMerger
from traindiff.analyse.merge.site import MergedSite
from traindiff.core.observation import CLEARED, LOSS_SCALE, Observation
from traindiff.core.shards import OPEN, Shard
from traindiff.core.summary import empty
from traindiff.storage import Recording, RecordingWriter, open_recording

ROWS = 4

KINDS: list[dict[str, Any]] = [
    {"phase": "forward", "path": "fc", "slot": "output[0]"},
    {"phase": "batch", "path": "", "slot": "input[0]"},
    {"phase": "backward", "path": "fc", "slot": "output[0]"},
    {"phase": "grad", "path": "fc.weight", "slot": "grad"},
    {"phase": "grad", "path": "fc.weight", "slot": "grad", "factor": 2.0},
    {"phase": "grad", "path": "fc.weight", "slot": "grad", "stage": "micro", "merge": "sum", "factor": 0.25},
    {"phase": "param", "path": "fc.weight", "slot": "value"},
    {"phase": "optimizer", "path": "fc.weight", "slot": "exp_avg", "unobserved": "made up"},
    {"phase": "loss", "path": "loss", "slot": "logged", "merge": "mean", "weight": 3.0},
    {"phase": "loss", "path": "loss", "slot": "backward", "merge": "sum"},
    {"phase": "forward", "stage": "operator", "path": "fc/aten.mm[0]", "slot": "output[0]"},
    {"phase": "forward", "stage": "product", "path": "fc/aten.mm[0]", "slot": "residual"},
    {"phase": "grad", "stage": CLEARED, "path": "all", "slot": "micro_step"},
    {"phase": "loss", "path": LOSS_SCALE, "slot": "scale"},
    {"phase": "grad", "path": "head.weight", "slot": "grad", "scaled": True},
]


@st.composite
def layouts(draw: st.DrawFn) -> list[list[dict[str, Any]]]:
    """For each rank, what is observed in a step."""
    special = draw(st.booleans())
    kinds = st.sampled_from(KINDS if special else KINDS[:-3])
    ranks = []
    for _ in range(draw(st.integers(1, 2))):
        seen = []
        for kind in draw(st.lists(kinds, min_size=1, max_size=10)):
            rows = draw(st.sampled_from([None, 0, ROWS]))
            flowing = kind["phase"] in ("batch", "forward", "backward")
            shard = Shard.whole((ROWS, 3)) if rows is None or not flowing else Shard(
                shape=(ROWS, 3), global_shape=(OPEN, 3), offset=(rows, 0)
            )  # fmt: skip
            seen.append(
                {**kind, "shard": shard, "micro_step": draw(st.integers(0, 1)), "call": draw(st.integers(0, 1))}
            )
        ranks.append(seen)
    return ranks


def write(path: Path, ranks: list[list[dict[str, Any]]], *, steps: int, seed: int) -> Recording:
    for rank, kinds in enumerate(ranks):
        about = {"world_size": len(ranks), "mesh": None, "settings": {"observe": ["forward"], "ranks": None}}
        writer = RecordingWriter(str(path), run=about, rank=rank, world_size=len(ranks))
        writer.write_rank(CONTENT)
        generator = np.random.default_rng(seed + rank)
        for step in range(steps):
            seen, summaries = [], []
            for order, kind in enumerate(kinds):
                about = {"stage": "", "optimizer": "optimizer", "dtype": "float32", "order": order, **kind}
                one = Observation(step=step, **about)
                values = generator.standard_normal(one.shard.shape).astype(np.float32)
                summaries.append(empty() if one.unobserved else summary_of(values, one.shard))
                seen.append(one)
            writer.write_step(seen, np.array(summaries))
        writer.close()
    return open_recording(str(path))


def content(entry: MergedSite) -> list[Any]:
    """All that an entry holds, comparable with `==`."""
    values = [getattr(entry, one.name) for one in fields(entry) if one.name not in ("summary", "parts")]
    parts = [(*part._replace(summary=None), np.array(part.summary).tobytes()) for part in entry.parts]
    return [*values, np.array(entry.summary).tobytes(), parts]


def everything(step: RunStep) -> list[Any]:
    observed = [
        [(seen, rank, np.array(s).tobytes()) for seen, rank, s in one] for one in (step.operators, step.products)
    ]
    tables = [step.table, *(one.table for one in step.earlier)]
    rest = step.without_idle and [step.without_idle[1], *(one.table for one in step.without_idle[0])]
    all_tables = [[(key, content(entry)) for key, entry in one.items()] for one in (*tables, *(rest or ()))]
    return [step.step, step.optimizer, step.finished, step.last, step.missing, observed, rest is None, all_tables]


@settings(max_examples=40, deadline=None)
@given(layouts(), st.integers(0, 1 << 20))
def test_a_planned_step_is_the_same_as_without_a_plan(
    tmp_path_factory: pytest.TempPathFactory, ranks: list[list[dict[str, Any]]], seed: int
) -> None:
    run = write(tmp_path_factory.mktemp("plan") / "run", ranks, steps=4, seed=seed)
    planned, plain = StepMerger(run), StepMerger(run)
    for of_ranks in rank_steps(run):
        found = everything(planned.merged(of_ranks))
        assert found == everything(plain.merged([replace(one, layout=None) for one in of_ranks]))


def test_steps_of_a_training_are_planned_from_the_third_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from traindiff.analyse.merge import run_steps

    merged: list[int] = []
    by_evaluation = run_steps._by_evaluation
    monkeypatch.setattr(run_steps, "_by_evaluation", lambda sites: merged.append(len(sites)) or by_evaluation(sites))
    run = open_recording(str(record(tmp_path / "run", steps=8)))
    assert len(list(run_steps.run_steps(run))) == 8
    assert len(merged) == 3  # the first has the parameters before it; the second is compared with the third
