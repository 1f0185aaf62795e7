"""Every kernel in the registry has what the registry says that it has."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from traindiff.core.kernels import summarize
from traindiff.core.kernels.registry import ARRAYS, AT_ONCE, PUT_OFF, Kernel
from traindiff.core.shards import Shard


@pytest.mark.parametrize("kernel", [*AT_ONCE, *ARRAYS, *PUT_OFF], ids=lambda kernel: kernel.needs)
def test_a_kernel_has_what_it_is_called_by(kernel: Kernel) -> None:
    module = kernel.load()
    if module is None:
        pytest.skip(f"{kernel.needs} is not installed")

    names = {"reads", "summarize"} if kernel not in PUT_OFF else {"reads", "DeviceRows"}
    assert {name for name in names if callable(getattr(module, name, None))} == names


def test_a_kernel_whose_package_is_missing_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = replace(AT_ONCE[0], module="traindiff_no_such_package.kernel", needs="traindiff_no_such_package")
    monkeypatch.setattr("traindiff.core.kernels.AT_ONCE", (missing,))

    assert missing.load() is None
    assert summarize(torch.ones(3), Shard.whole((3,)))["sum"] == 3.0


def test_a_kernel_whose_package_is_too_old_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("llvmlite.binding")
    for name in [name for name in sys.modules if name.startswith("traindiff.core.kernels.cpu")]:
        monkeypatch.delitem(sys.modules, name)
    package = sys.modules["traindiff.core.kernels"]
    monkeypatch.delattr(package, "cpu", raising=False)
    monkeypatch.setattr(binding, "llvm_version_info", (15, 0, 7))

    assert replace(AT_ONCE[0]).load() is None


def test_a_kernel_whose_library_cannot_be_loaded_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernel_without_library.py").write_text("raise OSError('libLLVM.so: cannot open shared object file')")
    monkeypatch.syspath_prepend(tmp_path)

    assert replace(AT_ONCE[0], module="kernel_without_library").load() is None


def test_a_kernel_that_cannot_be_imported_for_another_reason_says_so() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        replace(AT_ONCE[0], module="traindiff.core.kernels.no_such_module").load()
