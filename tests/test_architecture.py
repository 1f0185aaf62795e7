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
    "state": frozenset({"core", "storage", "observe", "analyse"}),
    "run": frozenset({"core", "storage", "observe", "analyse", "present"}),
    "compat": frozenset({"core", "storage", "observe", "analyse", "present", "run"}),
    "integrations": frozenset({"core", "observe", "run"}),
    "cli": frozenset({"core", "storage", "observe", "analyse", "present", "run", "compat", "state"}),
}
"""The layers, and what each may import beside itself."""

PUBLIC = frozenset({"__init__", "__main__", "testing", "mindspore"})
"""Modules that have names for users alone: they import any layer, and no layer imports them."""

WITHOUT_FRAMEWORK = (
    "core", "storage", "observe.common", "analyse", "present", "state", "compat.msprobe.importing",
    "compat.msprobe.exporting", "compat.onnxruntime.importing", "cli",
)  # fmt: skip
"""What can be imported where no framework is installed, except for:"""

OF_TORCH = (
    "core.torch_compat", "core.kernels.extent", "core.kernels.store", "core.kernels.torch_arrays",
    "core.kernels.projection", "core.kernels.cpu.summarize", "core.kernels.cpu.extent", "core.kernels.cpu.projection",
    "core.kernels.row_sums", "core.kernels.cpu.row_sums", "core.kernels.row_errors", "core.kernels.cpu.row_errors",
    "core.kernels.cpu.linear_checks", "core.kernels.contribution", "core.kernels.product_errors", "core.kernels.gpu",
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

    assert len(names) > 120
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


PRIVATE_NAMES = {"torch": "core/torch_compat/", "mindspore": "observe/mindspore/_mindspore_compat.py"}
"""The one place of each framework's private names."""

NOT_OF_A_FRAMEWORK = frozenset({
    "_replace", "_make", "_fields",  # of named tuples
    "_exit", "_getframe",  # of os and sys
    "_global_grad_norm",  # of DeepSpeed; observe/torch/sharding/deepspeed_*.py are the place of its names
    "_traindiff_number",  # traindiff's own, on modules
})  # fmt: skip

PRELOADED = ("run/processes/launch.py", "torch._dynamo")
"""A module to import in another process, named where torch is not imported."""


def private_uses(path: Path) -> Iterator[str]:
    """Private names of a framework that a file uses: imported, as attributes, or as text that names an attribute.

    Attributes count on any object but `self`, `cls` and `super()`: nobody uses the private names of another class, so
    those that remain are a framework's. Names of operators (`_softmax`) and of wrappers in paths are no attributes.
    """
    yield from (one for one in imported_names(path) if any(map(is_private, one.split("."))))
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            if is_private(node.attr) and ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(str(name.value)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch."):
            is_preloaded = node.value == PRELOADED[1] and path.as_posix().endswith(PRELOADED[0])
            if any(map(is_private, str(node.value).split("."))) and not is_preloaded:
                yield str(node.value)


def imported_names(path: Path) -> Iterator[str]:
    """What a file imports of these frameworks, with all parts of the names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = (f"{module}{alias.name}" for alias in node.names)
            yield from (name for name in names if name.partition(".")[0] in PRIVATE_NAMES)


def is_private(name: str) -> bool:
    """True for names with one underscore in front, that are no names of a named tuple's or the like."""
    is_name = name.isidentifier() and name.strip("_") != "" and name not in NOT_OF_A_FRAMEWORK
    return is_name and name.startswith("_") and not name.startswith("__")


def attribute_names(path: Path) -> set[str]:
    """Texts in a file that may name a private attribute."""
    texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
    return {text for text in texts if isinstance(text, str) and is_private(text)}


def where(path: Path) -> str:
    """The path of a file below `src/traindiff`."""
    return path.relative_to(SOURCE).as_posix()


def test_private_names_of_frameworks_are_in_one_place_each() -> None:
    kept = tuple(PRIVATE_NAMES.values())
    others = [path for path in FILES if not where(path).startswith((*kept, "core/kernels/gpu/"))]
    by_text = set().union(*(attribute_names(path) for path in FILES if where(path).startswith(kept)))

    assert {where(path): found for path in others if (found := [*private_uses(path)])} == {}
    assert {where(path): found for path in others if (found := attribute_names(path) & by_text)} == {}


def test_a_private_name_outside_its_place_is_found(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        "import torch._dynamo\nfrom torch._C import x\nfrom torch.utils import _pytree\nfrom ours import _fine\n"
        "torch._C\ntensor._version\nself._fine\nsuper()._fine\nkey._replace\ngetattr(module, '_modules', None)\n"
    )

    assert sorted(private_uses(file)) == [
        "getattr(module, '_modules', None)", "tensor._version", "torch._C", "torch._C.x", "torch._dynamo",
        "torch.utils._pytree",
    ]  # fmt: skip
