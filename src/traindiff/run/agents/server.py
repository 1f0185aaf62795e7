"""The server of `traindiff mcp`, which speaks the Model Context Protocol over standard input and output."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traindiff._version import __version__
from traindiff.errors import ConfigError, Problem, TraindiffError
from traindiff.run.agents.tools import Tools

if TYPE_CHECKING:
    from mcp.server import MCPServer

INSTRUCTIONS = """\
traindiff finds where the numbers of a neural-network training go wrong, from recordings of trainings.
Ask recordings() first. check(recording) judges one run; compare(baseline, candidate) names the first divergence of two.
Then explain(kind) of the finding, and show(...) the numbers at its site and step. explain("agents") says how to decide.
"""


def server(root: Path, *, may_run: bool = False) -> MCPServer[Any]:
    """The server, not yet started.

    Args:
        root: The directory of the recordings. Nothing outside it is read.
        may_run: Whether `investigate` may run trainings.

    Raises:
        ConfigError: The package `mcp` is not installed, or there is no such directory.
    """
    if not root.is_dir():
        problem = Problem(where=f"{root}", what="is no directory.", fix="Give the directory that holds recordings.")
        raise ConfigError("mcp", [problem], consequence="nothing was started")
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError:
        fix = "Install it with: pip install 'traindiff[mcp]'."
        problem = Problem(where="traindiff mcp", what="needs the package mcp, 2.0 or later.", fix=fix)
        raise ConfigError("mcp", [problem], consequence="nothing was started") from None

    found: MCPServer[Any] = MCPServer("traindiff", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")
    for tool in Tools(root, may_run=may_run).all():
        reads = tool.__name__ != "investigate"
        hints = ToolAnnotations(read_only_hint=reads, destructive_hint=False, open_world_hint=False)
        found.add_tool(_answering(tool), name=tool.__name__, annotations=hints, structured_output=False)
    return found


def _answering(tool: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The tool, whose errors are answers that the agent can read."""
    from mcp.server.mcpserver.exceptions import ToolError

    @wraps(tool)
    def answer(*args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return tool(*args, **kwargs)
        except (TraindiffError, OSError) as error:
            raise ToolError(str(error)) from None

    return answer
