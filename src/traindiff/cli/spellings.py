"""Other spellings of options that `traindiff verify` takes: those of earlier scripts, and what launchers add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from typer.core import TyperCommand

_ALSO = {"--iterations": "--steps"}
_STANDS_FOR = {"--use-torch-adam": ("--optimizer", "torch")}
_OF_LAUNCHERS = "--local-rank"
"""Added by the `deepspeed` launcher; the environment says the same."""


class OtherSpellings(TyperCommand):
    """A command that takes its options in other spellings too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """See `spelled_as_here`."""
        return super().parse_args(ctx, list(spelled_as_here(args)))


def spelled_as_here(arguments: Sequence[str]) -> Iterator[str]:
    """The same arguments as the command spells them: `--zero_stage` is `--zero-stage`, `--iterations` is `--steps`."""
    waiting = iter(arguments)
    for argument in waiting:
        if argument == "--":
            yield argument
            yield from waiting
            return
        if not argument.startswith("--"):
            yield argument
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        name = _ALSO.get(name, name)
        if name == _OF_LAUNCHERS:
            if not equals:
                next(waiting, None)
        else:
            yield from _STANDS_FOR.get(name, (f"{name}{equals}{value}",))
