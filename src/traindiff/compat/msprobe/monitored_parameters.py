"""Parameters and ranks that a configuration names, held against those that there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from traindiff.compat.msprobe.configuration import TASK, Configuration
from traindiff.errors import ConfigError, Problem
from traindiff.site import canonical_path


def check_parameters(configuration: Configuration, known: Iterable[str]) -> None:
    """Refuse names in `param_list` that no parameter has.

    Raises:
        ConfigError: Some are none.
    """
    there = dict.fromkeys(known)
    problems = [
        _unknown_parameter(name, list(there))
        for name in configuration.parameters
        if name not in there and canonical_path(name) not in there
    ]
    if problems:
        raise ConfigError(configuration.source, problems, consequence="nothing is monitored")


def check_ranks(configuration: Configuration, world_size: int) -> None:
    """Refuse ranks that there are not.

    Raises:
        ConfigError: Some are none.
    """
    beyond = [max(world_size, one.start) for one in configuration.ranks or () if one.stop > world_size]
    if beyond:
        ranks = "there is rank 0 alone" if world_size == 1 else f"there are ranks 0 to {world_size - 1}"
        problem = Problem(where='"rank"', what=f"holds {beyond[0]}, and {ranks}.", fix='Write "rank": [] for all.')
        raise ConfigError(configuration.source, [problem], consequence="nothing is monitored")


def is_monitored(configuration: Configuration, rank: int) -> bool:
    """Whether a rank is asked for."""
    return configuration.ranks is None or any(rank in one for one in configuration.ranks)


def literally(name: str) -> str:
    """A glob that matches a name and nothing else."""
    return "".join(f"[{one}]" if one in "*?[" else one for one in name)


def _unknown_parameter(name: str, known: Sequence[str]) -> Problem:
    near = get_close_matches(name, known, n=1)
    suggestion = f'Did you mean "{near[0]}"? ' if near else ""
    shown = ", ".join(known[:5]) + (", ..." if len(known) > 5 else ".")
    return Problem(
        where=f'"{TASK}", "param_list"', what=f'"{name}" is no parameter of the model.',
        fix=f"{suggestion}There are {len(known)}: {shown}",
    )  # fmt: skip
