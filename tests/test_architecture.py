"""Imports point down the list of layers in the design, and the analysis half never needs torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "traindiff"

VOCABULARY = frozenset(
    {
        "_version",
        "bounds",
        "csv_cells",
        "declared_shard",
        "detail",
        "errors",
        "framework",
        "observation",
        "region",
        "replica_setting",
        "rounding",
        "settings",
        "shards",
        "site",
        "steps",
        "summary",
        "tap_registry",
        "untrusted",
    }
)
"""Modules that every layer speaks: the lowest layer, without torch."""

MAY_IMPORT: dict[str, frozenset[str]] = {
    "vocabulary": frozenset(),
    "kernels": frozenset({"vocabulary"}),
    "taps": frozenset({"kernels", "vocabulary"}),
    "replicas": frozenset({"taps", "vocabulary"}),
    "recording": frozenset({"vocabulary"}),
    "findings": frozenset({"vocabulary"}),
    "merging": frozenset({"findings", "recording", "vocabulary"}),
    "alignment": frozenset({"merging", "findings", "recording", "vocabulary"}),
    "floors": frozenset({"alignment", "merging", "findings", "recording", "vocabulary"}),
    "directions": frozenset({"merging", "recording", "vocabulary"}),
    "rules": frozenset({"merging", "findings", "recording", "vocabulary"}),
    "comparison": frozenset(
        {"floors", "directions", "rules", "alignment", "merging", "findings", "recording", "vocabulary"}
    ),
    "health": frozenset({"rules", "merging", "findings", "recording", "vocabulary"}),
    "report": frozenset({"comparison", "directions", "findings", "health", "merging", "recording", "vocabulary"}),
    "viewer": frozenset({"comparison", "health", "recording", "report", "vocabulary"}),
    "engines": frozenset({"taps", "kernels", "vocabulary"}),
    "interop": frozenset({"directions", "kernels", "merging", "recording", "vocabulary"}),
    "launching": frozenset({"vocabulary"}),
    "sessions": frozenset({"launching", "engines", "replicas", "taps", "kernels", "recording", "vocabulary"}),
    "watching": frozenset({"sessions", "engines", "taps", "kernels", "vocabulary"}),
    "compat": frozenset(
        {
            "watching",
            "interop",
            "mindspore",
            "sessions",
            "taps",
            "kernels",
            "report",
            "directions",
            "findings",
            "recording",
            "vocabulary",
        }
    ),
    "mindspore": frozenset({"sessions", "taps", "kernels", "recording", "vocabulary"}),
    "recipes": frozenset(
        {
            "setups",
            "launching",
            "sessions",
            "replicas",
            "recording",
            "comparison",
            "findings",
            "report",
            "floors",
            "merging",
            "vocabulary",
        }
    ),
    "setups": frozenset({"sessions", "engines", "vocabulary"}),
    "running": frozenset({"sessions", "taps", "vocabulary"}),
    "integrations": frozenset({"sessions", "vocabulary"}),
    "testing": frozenset({"recipes", "sessions", "comparison", "recording", "vocabulary"}),
    "lockstep": frozenset(
        {
            "setups",
            "sessions",
            "engines",
            "replicas",
            "taps",
            "kernels",
            "comparison",
            "floors",
            "alignment",
            "merging",
            "findings",
            "recording",
            "vocabulary",
        }
    ),
    "doctor": frozenset({"setups", "recipes", "sessions", "taps", "kernels", "recording", "vocabulary"}),
    "demo": frozenset({"setups", "recipes", "sessions", "taps", "recording", "comparison", "report", "vocabulary"}),
    "cli": frozenset(
        {
            "demo",
            "doctor",
            "running",
            "recipes",
            "setups",
            "launching",
            "sessions",
            "engines",
            "interop",
            "watching",
            "viewer",
            "report",
            "health",
            "comparison",
            "recording",
            "vocabulary",
        }
    ),
    "__main__": frozenset({"cli"}),
}
"""The layers, and what each may import beside itself. The public module, `traindiff`, imports any of them lazily."""

WITHOUT_TORCH = (
    "vocabulary", "recording", "findings", "merging", "alignment", "floors", "rules", "comparison", "health", "report",
    "viewer",
    "vocabulary", "recording", "findings", "merging", "alignment", "directions", "floors", "rules", "comparison",
    "health", "report", "interop",
)  # fmt: skip


def layer_of(module: str) -> str:
    """The layer of `traindiff.MODULE...`, given without the `traindiff.` in front."""
    first = module.partition(".")[0]
    return "vocabulary" if first in VOCABULARY else first


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top, in functions or for type checkers only."""
    package = path.relative_to(SOURCE.parent).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            if module == "traindiff":
                yield from (f"traindiff.{alias.name}" for alias in node.names)
            else:
                yield module


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")


def file_layer(path: Path) -> str:
    return layer_of(path.relative_to(SOURCE).parts[0].removesuffix(".py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    layer = file_layer(path)
    found = {layer_of(module.partition(".")[2]) for module in imported_modules(path) if module.startswith("traindiff.")}
    found = {other for other in found if other in MAY_IMPORT or (SOURCE / other).exists()}  # not public names

    assert layer in MAY_IMPORT, f"{path} is in no layer of the design"
    assert found - {layer} <= MAY_IMPORT[layer]


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if file_layer(path) in (*WITHOUT_TORCH, "mindspore")],
    ids=lambda path: str(path.relative_to(SOURCE)),
)
def test_the_analysis_half_and_other_frameworks_never_import_torch(path: Path) -> None:
    assert not [module for module in imported_modules(path) if module.partition(".")[0] == "torch"]


PACKAGES = [
    "traindiff",
    *(f"traindiff.{name}" for name in sorted(VOCABULARY)),
    *(f"traindiff.{name}" for name in (*WITHOUT_TORCH[1:], "cli") if (SOURCE / name / "__init__.py").exists()),
    "traindiff.core.kernels",
    "traindiff.mindspore",
    "traindiff.observe.torch.hooks.inspect",
    *sorted(
        {
            module
            for path in FILES
            if file_layer(path) == "mindspore"
            for module in imported_modules(path)
            if module.startswith(
                ("traindiff.core.kernels.", "traindiff.observe.torch.session.", "traindiff.observe.torch.hooks.")
            )
        }
    ),
]


@pytest.mark.parametrize("module", PACKAGES)
def test_importing_what_needs_no_torch_imports_no_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules or 'mindspore' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], timeout=120, check=False).returncode == 0


def test_without_torch_recording_says_what_to_install() -> None:
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import traindiff
try:
    traindiff.record
except ModuleNotFoundError as error:
    print(error)
traindiff.open_recording, traindiff.inspect
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=120, check=True, capture_output=True, text=True)

    assert result.stdout == (
        "traindiff.record needs torch, which is not installed. Install it with: pip install 'traindiff[torch]'\n"
    )


def test_without_mindspore_recording_one_of_its_trainings_says_what_to_install() -> None:
    code = """
import sys
sys.modules["mindspore"] = None  # as if it were not installed
import traindiff.mindspore
try:
    traindiff.observe.mindspore.record
except ModuleNotFoundError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=120, check=True, capture_output=True, text=True)

    assert result.stdout == (
        "traindiff.observe.mindspore.record needs mindspore, which is not installed. "
        "Install it with: pip install 'traindiff[mindspore]'\n"
    )
