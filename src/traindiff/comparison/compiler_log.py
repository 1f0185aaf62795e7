"""What torch's compiler said of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerLog:
    """What torch's compiler said of a run, over all its ranks.

    Attributes:
        graph_breaks: Why graphs were broken, one entry each, as the compiler says it.
        recompiles: What made it compile again.
        num_guards: Conditions under which what it compiled may be used.
        file: All of it.
    """

    graph_breaks: tuple[str, ...]
    recompiles: tuple[str, ...]
    num_guards: int
    file: str

    @property
    def says(self) -> str:
        """The counts, in a line."""
        breaks, again = len(self.graph_breaks), len(self.recompiles)
        return (
            f"Compiler: {breaks} graph {'break' if breaks == 1 else 'breaks'}, {again} "
            f"{'recompilation' if again == 1 else 'recompilations'}, {self.num_guards} guards; see {self.file}."
        )

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        return {
            "graph_breaks": list(self.graph_breaks),
            "recompiles": list(self.recompiles),
            "num_guards": self.num_guards,
            "file": self.file,
        }
