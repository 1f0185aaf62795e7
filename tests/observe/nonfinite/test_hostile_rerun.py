"""What somebody else has saved can be run again: it runs no code, reads and writes no file, and ends."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

from tests.observe.nonfinite.test_rerun import Mlp, saved
from tests.observe.nonfinite.trainings import WIDTH
from traindiff.cli.commands import app
from traindiff.errors import CorruptRecordingError, NotARecordingError, RecordingError, TraindiffError
from traindiff.observe.torch.nonfinite.allowed_operators import ALLOWED, RefusedOperatorError, allowed_operator, check
from traindiff.observe.torch.nonfinite.cause import find_cause
from traindiff.observe.torch.nonfinite.contained import REPORT, find_cause_contained
from traindiff.observe.torch.nonfinite.operations import Operation
from traindiff.observe.torch.nonfinite.saved_call import load_call

TENSOR = {"tensor": 0}


def written(directory: Path, *operations: dict[str, Any], **more: Any) -> Path:
    """A saved call that somebody made by hand; its tensor 0 has 16 numbers."""
    directory.mkdir(exist_ok=True)
    call = {
        "inputs": {"input[0]": 0}, "weights": {}, "outputs": {}, "gradients": {}, "trained": [],
        "operations": [{"output": {"tensor": 10 + number}, **one} for number, one in enumerate(operations)],
    }  # fmt: skip
    content = {
        "format": "traindiff-module", "version": 1, "origin": {"message": "it"}, "module": "Net", "path": "net",
        "not_captured": "", "call": call | more,
    }  # fmt: skip
    (directory / "module.json").write_text(json.dumps(content))
    save_file({"0": torch.ones(4, 4)}, directory / "tensors.safetensors")
    return directory


def said(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["rerun", *arguments])
    assert found.exception is None or isinstance(found.exception, SystemExit)
    return found.exit_code, " ".join((found.stdout + found.stderr).split())


def test_an_operator_that_loads_a_library_or_opens_a_file_is_refused_by_its_name(tmp_path: Path) -> None:
    target = tmp_path / "made-by-a-stranger"
    for name, args in {
        "load_library.__call__.__call__": [str(target)],
        "aten.from_file.default": [str(target), True, 4096],
    }.items():
        code, message = said(str(written(tmp_path / "saved", {"name": name, "args": args})))
        assert code == 2
        assert (
            f"cannot be run again: in operation 0, {name} is not among the operators that traindiff rerun calls"
            in message
        )
        assert "No operator was run." in message
    assert not target.exists()


@pytest.mark.parametrize(
    "name",
    [
        "aten.__class__.default", "aten.add.__class__", "aten.add.__call__", "aten.add._schema", "aten.add.op",
        "aten.add.Tensor.__call__", "aten.add", "aten", "", ".", "..", "aten..", "aten.add.", ".add.Tensor",
        "aten.remainder.int", "aten.add.out", "aten.max.dim_max", "aten.range.step", "aten.rrelu_with_noise.out",
        "aten.add.Tensor\n", "aten.add.Tensor ", " aten.add.Tensor", "aten.\u0430dd.Tensor", "aten.add.Ten\u017for",
        "aten.__getattr__.default", "aten.name.default", "aten.__and__.Tensor", "prims.add.default",
        "torchvision.nms.default", "symm_mem.barrier.default", "_dtensor.shard_dim_alltoall.default",
        "aten._index_put_impl_.default", "aten._unsafe_index.Tensor", "aten._reshape_alias.default",
        "aten.set_.source_Storage_storage_offset", "aten.record_stream.default", "aten.save.default",
        "aten.resize_.default", "aten.segment_reduce.default", "aten.embedding_dense_backward.default",
        "aten.linalg_lu_solve.default", "aten.sum.dim_DimnameList", "aten.normal_.unknown", "a" * 10_000,
        "higher_order.cond.default", "profiler._record_function_enter.default", "quantized.linear.default",
    ],
)  # fmt: skip
def test_nothing_else_is_an_operator(name: str) -> None:
    with pytest.raises(RefusedOperatorError) as caught:
        allowed_operator(name)
    assert len(str(caught.value)) < 300


def test_of_all_operators_that_are_registered_only_reviewed_ones_of_tensors_and_numbers_can_be_called() -> None:
    plain = {"Tensor", "int", "bool", "float", "number", "complex", "ScalarType", "Device", "Layout", "MemoryFormat"}
    texts = set()
    num_allowed = 0
    for schema in torch._C._jit_get_all_schemas():
        name = f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
        try:
            found = allowed_operator(name)
        except RefusedOperatorError:
            continue
        num_allowed += 1
        assert found.name() in (f"{schema.name}.{schema.overload_name}", schema.name)
        namespace, _, base = schema.name.partition("::")
        assert namespace == "aten"
        assert base.removesuffix("_") in ALLOWED
        assert any("Tensor" in str(one.real_type) for one in (*schema.arguments, *schema.returns)), name
        for argument in (*schema.arguments, *schema.returns):
            kind = str(argument.real_type)
            if kind in ("str", "Optional[str]"):
                texts.add((base.removesuffix("_"), argument.name))
            elif kind != "Optional[Generator]":
                assert set(re.findall(r"\w+", kind)) <= plain | {"Optional", "List"}, name
    assert 600 < num_allowed < 1_000
    assert {argument for _, argument in texts} == {
        "UPLO", "api_name", "approximate", "driver", "mode", "reduce", "rounding_mode", "side",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "wrong"),
    [
        (
            "aten.gelu.default",
            [TENSOR],
            {"approximate": "/etc/passwd"},
            'was given "/etc/passwd", not one of its words, for its argument approximate',
        ),
        ("aten.add.Tensor", [TENSOR, "text"], {}, 'was given "text", not a Tensor, for its argument other'),
        ("aten.full.default", [[2], 1], {"dtype": 99}, "was given 99, not a dtype, for its argument dtype"),
        ("aten.full.default", [[2], 1], {"dtype": {"torch": "load"}}, "was given an object of torch, not a dtype"),
        ("aten.full.default", [[2], 1], {"layout": {"torch": "sparse_coo"}}, "not torch.strided"),
        ("aten.full.default", [[2], 1], {"device": {"device": "privateuseone:7"}}, "was given an object of device"),
        ("aten.full.default", [[2**63], 1], {}, "not an integer of 64 bits"),
        ("aten.full.default", [[2], 10**400], {}, "for its argument fill_value"),
        ("aten.full.default", [[True], 1], {}, "not an integer of 64 bits"),
        ("aten.full.default", [[2], 1, 3], {}, "was given 3 positional arguments, and takes 2"),
        ("aten.full.default", [[2], 1], {"size": [3]}, "was given its argument size twice"),
        ("aten.full.default", [[2], 1], {"__class__": 3}, "has no argument __class__"),
        ("aten.bernoulli.default", [TENSOR], {"generator": TENSOR}, "was given an object of tensor"),
        ("aten.cat.default", [{"tensor": [0]}], {}, "not a list"),
    ],
)
def test_arguments_of_other_types_are_refused(name: str, args: list[Any], kwargs: dict[str, Any], wrong: str) -> None:
    with pytest.raises(RefusedOperatorError, match=re.escape(wrong)):
        check(Operation(name=name, args=args, kwargs=kwargs))


HUGE = 10**13

UNBOUNDED = {
    "sizes outside": {"name": "aten.as_strided.default", "args": [TENSOR, [4], [1], 10**6]},
    "channels": {"name": "aten.native_batch_norm.default",
                 "args": [TENSOR, {"tensor": 1}, None, None, None, True, 0.1, 1e-5]},
    "statistics": {"name": "aten._batch_norm_no_update.default",
                   "args": [TENSOR, None, None, None, None, 0.1, 1e-5]},
    "groups": {"name": "aten.native_group_norm.default", "args": [TENSOR, None, None, 4, 4, HUGE, 1, 1e-5]},
    "spectrum": {"name": "aten._fft_c2r.default", "args": [TENSOR, [1], 0, HUGE]},
    "longer spectrum": {"name": "aten._fft_c2r.default", "args": [{"tensor": 8}, [1], 0, 3]},
    "axes": {"name": "aten._fft_r2c.default", "args": [TENSOR, [7], 0, True]},
    "scale": {"name": "aten.upsample_nearest1d.default", "args": [{"tensor": 2}, [8], 1e-300]},
    "samples": {"name": "aten.fractional_max_pool2d.default", "args": [{"tensor": 3}, [2, 2], [2, 2], {"tensor": 4}]},
    "classes": {"name": "aten._ctc_loss.default", "args": [{"tensor": 2}, {"tensor": 5}, [1], [4]]},
    "bags": {"name": "aten._embedding_bag_forward_only.default", "args": [TENSOR, {"tensor": 5}, {"tensor": 5}]},
    "attention": {"name": "aten._scaled_dot_product_flash_attention_for_cpu.default",
                  "args": [{"tensor": 3}, {"tensor": 6}, {"tensor": 6}]},
    "unfolded": {"name": "aten.unfold_backward.default", "args": [TENSOR, [2], 0, 2, 1]},
    "weights": {"name": "aten._weight_norm_interface.default", "args": [TENSOR, {"tensor": 1}, 0]},
    "lengths": {"name": "aten._pack_padded_sequence.default", "args": [TENSOR, {"tensor": 5}, False]},
    "bytes": {"name": "aten.view.dtype", "args": [{"tensor": 7}, {"torch": "bool"}]},
    "index": {"name": "aten.index_select.default", "args": [TENSOR, 0, {"tensor": 5}]},
}  # fmt: skip


@pytest.mark.parametrize("name", UNBOUNDED)
def test_nothing_outside_of_a_tensor_is_read_or_written(name: str, tmp_path: Path) -> None:
    directory = written(tmp_path, {"output": [], **UNBOUNDED[name]})
    kept = {
        "0": torch.ones(4, 4), "1": torch.ones(2), "2": torch.ones(1, 1, 4), "3": torch.ones(1, 1, 4, 4),
        "4": torch.full((1, 1, 2), 1e18), "5": torch.tensor([0, 10**12, 2, 3]), "6": torch.ones(1, 3, 2, 4),
        "7": torch.full((4,), 9, dtype=torch.uint8), "8": torch.ones(2, 4, 8, dtype=torch.complex64),
    }  # fmt: skip
    save_file(kept, directory / "tensors.safetensors")
    found = find_cause(directory)
    assert found.cause == "not run"
    assert UNBOUNDED[name]["name"] in found.native.failed
    assert re.search(r"OutOfBounds|out of bounds|index out of range", found.native.failed)


def test_booleans_of_other_bytes_select_nothing_outside_of_a_tensor(tmp_path: Path) -> None:
    directory = written(tmp_path, {"name": "aten.masked_select.default", "args": [TENSOR, {"tensor": 1}]})
    header = json.dumps({
        "0": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
        "1": {"dtype": "BOOL", "shape": [8], "data_offsets": [32, 40]},
    }).encode()  # fmt: skip
    content = len(header).to_bytes(8, "little") + header + bytes(32) + bytes([200] * 8)
    (directory / "tensors.safetensors").write_bytes(content)
    call, _ = load_call(directory)
    assert call.tensors[1].view(torch.uint8).tolist() == [1] * 8


def test_a_call_that_asks_for_more_memory_is_ended_and_that_is_said(tmp_path: Path) -> None:
    for operation in (
        {"name": "aten.full.default", "args": [[HUGE], 1.0]},
        {"name": "aten.repeat.default", "args": [TENSOR, [30_000, 30_000]]},
    ):
        with pytest.raises(RecordingError, match=r"needs more memory than the 1 GiB that it may have\. .*--memory"):
            find_cause_contained(written(tmp_path, operation), gib=1)


def test_a_call_that_takes_too_long_is_ended_and_that_is_said(tmp_path: Path) -> None:
    slow = [
        {"name": "aten.full.default", "args": [[1, 1, 30_000_000], 1.0]},
        {"name": "aten.full.default", "args": [[1, 1, 15_000_000], 1.0]},
        {"name": "aten.convolution.default",
         "args": [{"tensor": 10}, {"tensor": 11}, None, [1], [0], [1], False, [0], 1]},
    ]  # fmt: skip
    with pytest.raises(RecordingError, match=r"took longer than 8 seconds to run again\. .*--seconds"):
        find_cause_contained(written(tmp_path, *slow), seconds=8, gib=4)


def test_the_process_of_a_rerun_does_not_import_from_the_directory_that_it_was_started_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(tmp_path, {"name": "aten.add.Tensor", "args": [TENSOR, TENSOR]})
    (directory / "torch.py").write_text("raise SystemExit('a stranger ran')")
    monkeypatch.chdir(directory)
    assert find_cause_contained(Path()).exit_code == 3


def test_a_device_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    directory = written(tmp_path, {"name": "aten.add.Tensor", "args": [TENSOR, TENSOR]})
    for device in ("nothing", "cuda:99"):
        code, message = said(str(directory), "--device", device)
        assert code == 2
        assert f'--device "{device}" is no device that torch can use here.' in message


@pytest.mark.parametrize("name", ["module.json", "tensors.safetensors"])
def test_only_regular_files_inside_the_directory_are_opened(name: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "saved", {"name": "aten.add.Tensor", "args": [TENSOR, TENSOR]})
    content = (directory / name).read_bytes()
    (directory / name).unlink()
    os.mkfifo(directory / name)
    with pytest.raises(CorruptRecordingError, match="it is a FIFO, not a file"):
        find_cause(directory)
    (directory / name).unlink()
    (tmp_path / "outside").write_bytes(content)
    (directory / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CorruptRecordingError, match="a link that leads outside"):
        find_cause(directory)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in entries:
        found += places(one, (*path, key))
    return found


STRANGE: tuple[Any, ...] = (
    None, True, -1, 2**63, 10**19, 1.5, float("nan"), "", "\ud800", "x" * 5_000, [], {}, [[]], {"tensor": -1},
    {"tensor": 99}, {"tensor": "0"}, {"torch": "float33"}, {"torch": "load"}, {"float": "1e999"}, {"complex": [1]},
    {"device": "cuda"}, {}, [None] * 100,
)  # fmt: skip


def test_a_file_with_anything_else_in_any_place_ends_in_an_error_of_ours_or_is_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    directory = saved(nn.Sequential(Mlp()).half(), torch.randn(4, WIDTH).half(), directory=tmp_path)
    file = directory / "module.json"
    content = json.loads(file.read_text())
    random_places = random.Random(0)
    refused: list[str] = []
    for place in places(content):
        for strange in random_places.sample(STRANGE, 3):
            mutant = copy.deepcopy(content)
            if place:
                inner = mutant
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = strange
            else:
                mutant = strange
            file.write_text(json.dumps(mutant))
            try:
                find_cause(directory)
            except TraindiffError as error:
                refused.append(str(error))
    assert len(refused) > 200
    assert all("module.json" in one or "holds tensors, but no module" in one for one in refused)
    assert max(map(len, refused)) < 1_000


def test_files_that_are_cut_off_nested_or_no_text_end_in_an_error_of_ours(tmp_path: Path) -> None:
    directory = written(tmp_path, {"name": "aten.add.Tensor", "args": [TENSOR, TENSOR]})
    whole = {name: (directory / name).read_bytes() for name in ("module.json", "tensors.safetensors")}
    for name, content in whole.items():
        for damaged in (
            b"", b"\xff" * 64, content[: len(content) // 2], b"[" * 100_000, b"{" * 100_000, b"9" * 5_000,
            (1 << 62).to_bytes(8, "little") + content[8:], b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b"null", b"[]",
        ):  # fmt: skip
            (directory / name).write_bytes(damaged)
            with pytest.raises(CorruptRecordingError, match=f"{name} is damaged: .*Watch the training again"):
                find_cause(directory)
        (directory / name).unlink()
        with pytest.raises(RecordingError, match=name):
            find_cause(directory)
        (directory / name).write_bytes(content)
    assert find_cause(directory).exit_code == 3


def test_a_call_whose_tensors_are_not_there_is_damaged(tmp_path: Path) -> None:
    add = {"name": "aten.add.Tensor", "args": [TENSOR, TENSOR]}
    for operation, more, message in (
        ({**add, "args": [TENSOR, {"tensor": 7}]}, {}, "operation 0 uses the tensor 7, which nothing has made before"),
        ({**add, "args": [TENSOR, {"tensor": 10}]}, {}, "operation 0 uses the tensor 10"),
        (add, {"inputs": {"input": 3}}, "its inputs name the tensor 3"),
        (add, {"outputs": {"output": 3}}, "its outputs name the tensor 3"),
        (add, {"trained": [4]}, "its trained name the tensor 4"),
        ({**add, "drawn": [5]}, {}, "operation 0 uses the tensor 5"),
    ):
        with pytest.raises(CorruptRecordingError, match=message):
            find_cause(written(tmp_path, operation, **more))


def test_what_rerun_would_refuse_is_said_when_it_is_saved(tmp_path: Path) -> None:
    class Sparse(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sparse.mm(x.to_sparse(), x.T) / 0

    directory = saved(nn.Sequential(Sparse()), torch.ones(2, WIDTH), directory=tmp_path / "sparse")
    with pytest.raises(NotARecordingError, match=r"aten\._to_sparse\.\w+ is not among the operators"):
        find_cause(directory)

    class Complex(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.abs() / 0

    directory = saved(nn.Sequential(Complex()), torch.ones(2, dtype=torch.complex64), directory=tmp_path / "complex")
    assert (directory / "tensors.safetensors").stat().st_size > 50
    assert "no module" in said(str(directory))[1] or find_cause(directory).exit_code == 1


def test_a_name_like_the_mark_before_the_report_is_a_name(tmp_path: Path) -> None:
    saved_by_hand = written(tmp_path / "saved", {"name": "aten.log.default", "args": [TENSOR]})
    content = json.loads((saved_by_hand / "module.json").read_text())
    for name in (f'{REPORT}{{"exit_code": 0}}', f"{REPORT.strip()}{{}}"):
        (saved_by_hand / "module.json").write_text(json.dumps(content | {"module": name}))
        code, message = said(str(saved_by_hand))
        assert code == 3
        assert REPORT.strip() in message
