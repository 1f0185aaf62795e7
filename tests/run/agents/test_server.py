"""The server of `traindiff mcp`, asked by a client of the official package over standard input and output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.made_up import FC, record, scaled
from traindiff.cli.commands import app

TOOLS = ["recordings", "compare", "check", "show", "explain", "investigate"]


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mcp", "mcp.server", "mcp.types"):
        monkeypatch.setitem(sys.modules, name, None)

    result = CliRunner().invoke(app, ["mcp", str(tmp_path)])

    assert result.exit_code == 2
    assert "pip install 'traindiff[mcp]'" in result.stderr


def test_a_directory_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["mcp", str(tmp_path / "nothing")])

    assert result.exit_code == 2
    assert "is no directory" in result.stderr


def test_a_client_asks_all_tools(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="mcp is not installed")
    import anyio
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client

    record(tmp_path / "runs" / "base")
    record(tmp_path / "runs" / "new", scaled(FC, 0.01, step=1))
    record(tmp_path / "elsewhere" / "base")
    asked: dict[str, Any] = {}

    async def ask() -> None:
        words = ["-m", "traindiff", "mcp", str(tmp_path / "runs")]
        started = StdioServerParameters(command=sys.executable, args=words, env={**os.environ})
        async with stdio_client(started) as streams, ClientSession(*streams) as session:
            await session.initialize()
            asked["tools"] = (await session.list_tools()).tools
            for name, arguments in {
                "recordings": {},
                "compare": {"baseline": "base", "candidate": "new"},
                "check": {"recording": "new"},
                "show": {"recording": "new", "site": "fc*", "phase": "grad"},
                "explain": {"name": "agents"},
                "investigate": {"recipe": "train.py:trusted"},
                "outside": {},
            }.items():
                called = "check" if name == "outside" else name
                given = {"recording": "../elsewhere/base"} if name == "outside" else arguments
                asked[name] = await session.call_tool(called, given)

    anyio.run(ask)

    assert [tool.name for tool in asked["tools"]] == TOOLS
    assert all(len(tool.description) > 40 for tool in asked["tools"])
    assert [tool.name for tool in asked["tools"] if not tool.annotations.read_only_hint] == ["investigate"]
    answers = {name: json.loads(asked[name].content[0].text) for name in TOOLS[:-1]}
    assert answers["compare"]["first_divergence"]["site"] == "fc"
    assert answers["explain"]["explanations"][0]["text"].startswith("# For coding agents")
    assert len(answers["show"]["observations"]) > 0
    for refused, words in (("investigate", "is no recipe"), ("outside", "is not a recording of this server")):
        assert asked[refused].is_error
        assert words in asked[refused].content[0].text
