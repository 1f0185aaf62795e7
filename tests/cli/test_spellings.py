"""Options of `traindiff verify` in the spellings of earlier scripts, and what launchers add."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from typer.main import get_command

from traindiff.cli.commands import app
from traindiff.cli.setup_options import SetupOptions


def read(command: str, given: str) -> tuple[dict[str, Any], Any]:
    """The values of a command's options, and how it would run the trainings."""
    context = get_command(app).commands[command].make_context(command, given.split())  # type: ignore[attr-defined]
    values = dict(context.params)
    setup = SetupOptions(**{one.name: values.pop(one.name) for one in fields(SetupOptions)})
    return values, setup.requested()


@pytest.mark.parametrize("command", ["verify", "investigate"])
@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("recipe --zero_stage 3", "recipe --zero-stage 3"),
        ("recipe --offload_device=cpu", "recipe --offload-device=cpu"),
        ("recipe --gradient_accumulation_steps 2", "recipe --gradient-accumulation-steps 2"),
        ("recipe --baseline_engine=ddp --use_torch_adam", "recipe --baseline-engine ddp --optimizer torch"),
        ("recipe --use-torch-adam", "recipe --optimizer torch"),
        ("recipe --iterations 5", "recipe --steps 5"),
        ("recipe --iterations=5", "recipe --steps=5"),
        ("--local_rank=1 train.py:my_recipe", "train.py:my_recipe"),
        ("--local-rank 1 train.py:my_recipe", "train.py:my_recipe"),
        ("train.py:my_recipe -o my_output --candidate my_train.py:a_b", "train.py:my_recipe --output my_output "
         "--candidate=my_train.py:a_b"),
        ("--compile -- --zero_stage", "--compile -- --zero_stage"),
    ],
)  # fmt: skip
def test_other_spellings_are_read_as_ours(command: str, given: str, ours: str) -> None:
    assert read(command, given) == read(command, ours)


def test_what_is_read_is_what_was_written() -> None:
    values, setup = read(
        "verify", "--iterations 5 --zero_stage 3 --dtype torch.bfloat16 --verbose_logging -- --zero_stage"
    )

    assert (values["steps"], values["verbose_logging"], values["recipe"]) == (5, True, "--zero_stage")
    assert (setup["zero_stage"], setup["dtype"], setup["optimizer"]) == (3, "bfloat16", None)
