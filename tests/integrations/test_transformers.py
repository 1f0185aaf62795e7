"""The callback for transformers' `Trainer`, with the library itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import traindiff
from tests.integrations.same_bits import differing, micro_steps, numbers, sites

transformers = pytest.importorskip("transformers", reason="transformers is not installed; make test-integrations")
pytest.importorskip(
    "accelerate", reason="accelerate, which its Trainer needs, is not installed; make test-integrations"
)

from traindiff.compat.transformers import UnderflowOverflowCallback  # noqa: E402
from traindiff.integrations.transformers import RecordingCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


class Texts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def train(
    where: Path, *callbacks: Any, resume: str | None = None, broken: bool = False, **settings: Any
) -> dict[str, Tensor]:
    transformers.set_seed(1)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    arguments = {
        "output_dir": str(where), "per_device_train_batch_size": 4, "max_steps": 4, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, **settings,
    }  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    if broken:
        torch.nn.init.constant_(model.transformer.h[1].mlp.c_fc.weight, torch.inf)
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(**arguments),
        train_dataset=Texts(),
        eval_dataset=Texts(),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    return {name: one.clone() for name, one in trainer.model.state_dict().items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 2, "bf16": True, "eval_strategy": "steps", "eval_steps": 2},
    ],
    ids=["plain", "accumulated-bfloat16-evaluated"],
)
def test_a_training_computes_the_same_bits_and_is_recorded(tmp_path: Path, settings: dict[str, Any]) -> None:
    without = train(tmp_path / "without", **settings)
    recording = tmp_path / "recording"

    assert differing(without, train(tmp_path / "with", RecordingCallback(recording), **settings)) == []
    assert numbers(recording) == [0, 1, 2, 3]
    assert micro_steps(recording, step=1) == list(range(settings.get("gradient_accumulation_steps", 1)))
    assert {
        ("batch", "", "input.input_ids"), ("batch", "", "input.labels"),
        ("forward", "transformer.h.1.mlp.c_fc", "output[0]"), ("backward", "transformer.h.0", "output[0]"),
        ("grad", "transformer.wte.weight", "grad"), ("optimizer", "transformer.wte.weight", "exp_avg"),
    } <= {(phase, path, slot) for phase, path, slot in sites(recording, step=2)}  # fmt: skip
    again = tmp_path / "again"
    train(tmp_path / "with-again", RecordingCallback(again), **settings)
    assert traindiff.compare(recording, again).verdict == "identical"


def test_a_training_that_goes_on_has_the_numbers_of_the_steps_that_it_makes(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2}
    whole = train(tmp_path / "whole", RecordingCallback(tmp_path / "baseline"), **saved)
    checkpoint = str(tmp_path / "whole" / "checkpoint-2")
    resumed = train(tmp_path / "rest", RecordingCallback(tmp_path / "candidate"), resume=checkpoint, **saved)

    assert differing(whole, resumed) == []
    assert numbers(tmp_path / "candidate") == [2, 3]
    found = traindiff.compare(tmp_path / "baseline", tmp_path / "candidate", steps="2-3")
    assert found.verdict == "identical", str(found)


def test_the_one_callback_that_watches_prints_what_the_option_of_the_library_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for callbacks, settings in (([], {"debug": "underflow_overflow"}), ([UnderflowOverflowCallback()], {})):
        capsys.readouterr()
        with pytest.raises(ValueError, match="DebugUnderflowOverflow: inf/nan detected"):
            train(tmp_path / "run", *callbacks, broken=True, **settings)
        printed.append(capsys.readouterr().out)

    assert "Detected inf/nan during batch_number=0" in printed[0]
    assert "transformer.h.1.mlp.c_fc Conv1D" in printed[0]
    assert printed[1] == printed[0]


def test_settings_are_checked_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match=r"record\(evry=\.\.\.\)"):
        RecordingCallback(tmp_path, evry=2)
    with pytest.raises(traindiff.ConfigError, match="at least 1"):
        RecordingCallback(tmp_path, every=0)
