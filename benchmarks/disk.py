"""How much disk a recorded step takes: `python benchmarks/disk.py`, with the extra `bench` installed.

GPT-2 small is trained as it is. How many observations a step has depends on how many modules and
parameters a model has, not on how wide they are, so those of the large models are counted on models
with all of their layers, but narrow. docs/cost.md has the arithmetic.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import traindiff
from traindiff.storage import open_recording

STEPS = 4
VOCABULARY = 128


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What the steps of a recording hold.

    Attributes:
        phases: Observations of the last step, by phase.
        bytes_per_step: On disk, the schema and the files that are written once left out.
    """

    phases: Counter[str]
    bytes_per_step: float

    @property
    def observations(self) -> int:
        """Observations of the last step."""
        return self.phases.total()


def models() -> Iterator[tuple[str, PreTrainedModel]]:
    """Models by what they stand for."""
    torch.manual_seed(0)
    yield "GPT-2 small", GPT2LMHeadModel(GPT2Config())
    for name, layers in (("Llama 7B, narrow", 32), ("Llama 70B, narrow", 80)):
        yield name, LlamaForCausalLM(
            LlamaConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
                num_key_value_heads=2, vocab_size=VOCABULARY,
            )
        )  # fmt: skip


def measure(model: PreTrainedModel, path: Path) -> Measured:
    """Train for a few steps with AdamW and record everything that `record` observes by default."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    stream = path / "rank-00000" / "observations.arrows"
    sizes: list[int] = []
    with traindiff.record(path, model, optimizer, strict=True):
        for _ in range(STEPS):
            tokens = torch.randint(VOCABULARY, (2, 64))
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sizes.append(stream.stat().st_size)
    *_, last = open_recording(str(path)).steps(0)
    # The first step holds the parameters before it, too, and the optimizer has no state yet.
    return Measured(
        phases=Counter(one.phase for one in last.observations), bytes_per_step=(sizes[-1] - sizes[1]) / (STEPS - 2)
    )


def main() -> None:
    """Measure and print."""
    print("| model | modules | parameters | elements | observations by phase | observations | bytes each |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, model in models():
        with tempfile.TemporaryDirectory() as directory:
            found = measure(model, Path(directory) / "run")
        parameters = list(model.parameters())
        phases = ", ".join(f"{phase} {count}" for phase, count in found.phases.items())
        print(
            f"| {name} | {len(list(model.modules()))} | {len(parameters)} | {sum(one.numel() for one in parameters):,} "
            f"| {phases} | {found.observations:,} | {found.bytes_per_step / found.observations:,.0f} |"
        )


if __name__ == "__main__":
    main()
