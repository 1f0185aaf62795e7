"""Imports point down the layers of the tree, and what needs no framework imports none."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "traindiff"

MAY_IMPORT: dict[str, frozenset[str]] = {
    "core": frozenset(),
    "storage": frozenset({"core"}),
    "observe": frozenset({"core", "storage"}),
    "analyse": frozenset({"core", "storage"}),
    "present": frozenset({"core", "storage", "analyse"}),
    "run": frozenset({"core", "storage", "observe", "analyse", "present"}),
    "compat": frozenset({"core", "storage", "observe", "analyse", "present"}),
    "integrations": frozenset({"core", "observe"}),
    "cli": frozenset({"core", "storage", "observe", "analyse", "present", "run", "compat"}),
}
"""The layers, and what each may import beside itself."""

PUBLIC = frozenset({"__init__", "__main__", "testing", "mindspore"})
"""Modules that have names for users alone: they import any layer, and no layer imports them."""

WITHOUT_FRAMEWORK = (
    "core", "storage", "observe.common", "analyse", "present", "compat.msprobe.importing", "compat.msprobe.exporting",
    "compat.onnxruntime.importing", "cli",
)  # fmt: skip
"""What can be imported where no framework is installed, except for:"""

OF_TORCH = (
    "core._torch_compat", "core.kernels.extent", "core.kernels.store", "core.kernels.torch_arrays",
    "core.kernels.parts", "core.kernels.cpu", "core.kernels.gpu",
)  # fmt: skip


def name_of(path: Path) -> str:
    """Of a module, without the `traindiff.` in front."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top, in functions or for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            if node.module == "traindiff":
                yield from (f"traindiff.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


FILES = sorted(SOURCE.rglob("*.py"))


def layer_of(module: str) -> str:
    """The layer of a module, given without the `traindiff.` in front."""
    first = module.partition(".")[0]
    return "core" if first in ("errors", "_version") else first


def uses(path: Path) -> set[str]:
    """The layers that a file imports, beside its own."""
    found = {layer_of(module.partition(".")[2]) for module in imported_modules(path) if module.startswith("traindiff.")}
    return found - {layer_of(name_of(path))}


def test_every_file_is_in_a_layer() -> None:
    assert {layer_of(name_of(path)) for path in FILES} == {*MAY_IMPORT, *PUBLIC}


@pytest.mark.parametrize("layer", MAY_IMPORT)
def test_imports_point_down(layer: str) -> None:
    used = {path: uses(path) for path in FILES if layer_of(name_of(path)) == layer}
    assert {str(path): up for path, others in used.items() if (up := others - MAY_IMPORT[layer])} == {}
    assert set().union(*used.values()) == MAY_IMPORT[layer]  # and none is allowed that is not needed


def test_the_analysis_and_other_frameworks_never_import_torch() -> None:
    assert [
        name_of(path)
        for path in FILES
        if name_of(path).startswith(("storage", "analyse", "present", "observe.mindspore"))
        and any(module.partition(".")[0] == "torch" for module in imported_modules(path))
    ] == []


def test_importing_what_needs_no_framework_imports_none() -> None:
    """One process imports each of them in turn, so that the first that brings a framework along is named."""
    names = [f"traindiff.{name_of(path)}".removesuffix(".__init__") for path in FILES
             if name_of(path).startswith(WITHOUT_FRAMEWORK) and not name_of(path).startswith(OF_TORCH)]  # fmt: skip
    code = f"""
import importlib, sys
for name in {[*names, "traindiff.mindspore", "traindiff.integrations"]!r}:
    importlib.import_module(name)
    if {{"torch", "mindspore"}} & {{*sys.modules}}:
        sys.exit(name)
"""
    ended = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, stderr=subprocess.PIPE, text=True)

    assert len(names) > 150
    assert (ended.returncode, ended.stderr) == (0, "")


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
    traindiff.mindspore.record
except ModuleNotFoundError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], timeout=120, check=True, capture_output=True, text=True)

    assert result.stdout == (
        "traindiff.mindspore.record needs mindspore, which is not installed. "
        "Install it with: pip install 'traindiff[mindspore]'\n"
    )
