"""`PrecisionDebugger`: what it writes, and that it never harms the training."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import traindiff
from tests.compat.msprobe.monitoring import Small, configuration, directions, monitored, small, table, tables, train
from traindiff.compat.msprobe import PrecisionDebugger
from traindiff.storage.location import file_name


def test_each_level_has_its_columns_and_directions(tmp_path: Path) -> None:
    columns = {
        "L0": ["param_name", "MD5", "max", "min", "norm", "shape"],
        "L1": ["param_name", "max", "min", "norm", "shape"],
        "L2": ["param_name", "(-inf, -1]", "(-1, 0]", "(0, 1]", "(1, inf)", "=0", "max", "min", "norm", "shape"],
    }
    for level, header in columns.items():
        monitored(tmp_path, name=level, grad_level=level)
        rank = tmp_path / level / "rank0"
        assert list(table(rank / "grad_summary_0.csv")["fc.bias"]) == header
        assert (rank / "step0" / "fc.bias.npy").exists() == (level != "L0")
        content = (rank / "grad_summary_0.csv").read_bytes()
        assert content.startswith(b"\xef\xbb\xbf")
        assert content.count(b"\r\n") == content.count(b"\n") == 4


def test_rows_and_directions_are_those_of_the_gradients(tmp_path: Path) -> None:
    gradients = monitored(tmp_path, grad_level="L2", bounds=[-0.05, 0, 0.05])

    for step, (rows, own) in enumerate(zip(tables(tmp_path / "dump"), gradients, strict=True)):
        assert list(rows) == list(own)
        for name, gradient in own.items():
            row = rows[name]
            found = directions(tmp_path / "dump", step, name)
            np.testing.assert_array_equal(found, (gradient > 0).numpy())
            assert found.dtype == np.bool_
            assert float(row["max"]) == gradient.max().item()
            assert float(row["min"]) == gradient.min().item()
            assert float(row["norm"]) == pytest.approx(gradient.double().norm().item(), rel=1e-7)
            assert json.loads(row["shape"]) == list(gradient.shape)
            inside = torch.bucketize(gradient.flatten(), torch.tensor([-0.05, 0, 0.05])).bincount(minlength=4)
            shares = [float(row[key]) for key in ("(-inf, -0.05]", "(-0.05, 0]", "(0, 0.05]", "(0.05, inf)")]
            assert shares == (inside.double() / gradient.numel()).tolist()
            assert float(row["=0"]) == (gradient == 0).double().mean().item()


def test_the_hash_is_an_md5_where_it_says_so(tmp_path: Path) -> None:
    gradients = monitored(tmp_path, grad_level="L0")
    for rows, own in zip(tables(tmp_path / "dump"), gradients, strict=True):
        assert {name: row["MD5"] for name, row in rows.items()} == {
            name: hashlib.md5(one.numpy().tobytes(), usedforsecurity=False).hexdigest() for name, one in own.items()
        }


def test_a_fingerprint_is_called_one(tmp_path: Path) -> None:
    monitored(tmp_path, grad_level="L0", hash="fingerprint")
    row = tables(tmp_path / "dump")[0]["fc.weight"]
    assert "MD5" not in row
    assert len(row["fingerprint"]) == 16


def test_without_bounds_the_columns_are_above_their_cells(tmp_path: Path) -> None:
    gradients = monitored(tmp_path, grad_level="L2", bounds=[])
    row = tables(tmp_path / "dump")[0]["fc.weight"]

    assert list(row) == ["param_name", "=0", "max", "min", "norm", "shape"]
    assert float(row["max"]) == gradients[0]["fc.weight"].max().item()


def test_nan_is_in_no_interval_and_is_not_hidden(tmp_path: Path) -> None:
    def edit(_step: int, model: nn.Module) -> None:
        model.fc.bias.grad[:2] = float("nan")  # type: ignore[index,union-attr]
        model.fc.bias.grad[2:] = 2.0  # type: ignore[index,union-attr]

    monitored(tmp_path, steps=1, grad_level="L2", edit=edit)
    row = tables(tmp_path / "dump")[0]["fc.bias"]

    assert [row[key] for key in ("(-inf, -1]", "(-1, 0]", "(0, 1]", "(1, inf)")] == ["0.0", "0.0", "0.0", "0.75"]
    assert (row["max"], row["norm"]) == ("nan", "nan")


def test_infinities_are_extremes(tmp_path: Path) -> None:
    def edit(_step: int, model: nn.Module) -> None:
        model.fc.bias.grad[0] = float("-inf")  # type: ignore[index,union-attr]

    monitored(tmp_path, steps=1, edit=edit)
    row = tables(tmp_path / "dump")[0]["fc.bias"]
    assert (row["min"], row["norm"]) == ("-inf", "inf")


def test_steps_and_parameters_are_chosen(tmp_path: Path) -> None:
    monitored(tmp_path, steps=8, step=[0, "4-6"], param_list=["head.weight", "fc.bias"])
    rank = tmp_path / "dump" / "rank0"

    assert {path.name for path in rank.glob("*.csv")} == {f"grad_summary_{step}.csv" for step in (0, 4, 5, 6)}
    assert list(table(rank / "grad_summary_4.csv")) == ["fc.bias", "head.weight"]


def test_the_training_computes_the_same_bits(tmp_path: Path) -> None:
    plain = small()
    train(plain)
    model = small()
    monitored(tmp_path, model=model, grad_level="L2")

    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not any(parameter._backward_hooks for parameter in model.parameters())


def test_the_files_of_a_step_are_there_when_it_has_ended(tmp_path: Path) -> None:
    model = small()
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(model)
    train(model, steps=1)

    assert len(tables(tmp_path / "dump")[0]) == 3
    debugger.stop()
    debugger.stop()


def test_a_process_that_just_ends_leaves_whole_files(tmp_path: Path) -> None:
    path = configuration(tmp_path)
    code = f"""
from tests.compat.msprobe.monitoring import *
model = small()
debugger = PrecisionDebugger({str(path)!r})
debugger.monitor(model)
train(model)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

    assert len(tables(tmp_path / "dump")) == 3
    assert traindiff.open_recording(str(tmp_path / "dump" / "recording")).status(0).ending == "closed"


def test_two_optimizers_count_their_own_steps_and_share_the_tables(tmp_path: Path) -> None:
    model = small()
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(model)
    optimizers = [torch.optim.SGD(model.fc.parameters(), lr=0.1), torch.optim.Adam(model.head.parameters())]
    for step in range(4):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizers[0].step()
        if step % 2:
            optimizers[1].step()
        model.zero_grad()
    debugger.stop()

    both, one = ["fc.bias", "fc.weight", "head.weight"], ["fc.bias", "fc.weight"]
    assert [sorted(rows) for rows in tables(tmp_path / "dump")] == [both, both, one, one]


def test_a_second_call_with_the_same_model_counts_nothing_twice(tmp_path: Path) -> None:
    model = small()
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(model)
    with pytest.warns(traindiff.TraindiffWarning, match="is monitored already"):
        debugger.monitor(model)
    train(model)
    debugger.stop()

    assert len(tables(tmp_path / "dump")) == 3


def test_a_second_model_is_refused(tmp_path: Path) -> None:
    debugger = PrecisionDebugger(configuration(tmp_path))
    model = small()
    debugger.monitor(model)
    with pytest.raises(traindiff.ConfigError, match="another model is monitored"):
        debugger.monitor(small())
    train(model, steps=1)
    debugger.stop()


def test_another_debugger_in_the_same_process_has_its_own_configuration(tmp_path: Path) -> None:
    monitored(tmp_path, name="first", grad_level="L1")
    monitored(tmp_path, name="second", grad_level="L0")
    assert "MD5" in tables(tmp_path / "second")[0]["fc.bias"]
    assert "MD5" not in tables(tmp_path / "first")[0]["fc.bias"]


class Unusual(nn.Module):
    """Parameters whose gradients are empty, sparse, complex, scalar, or missing."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.table = nn.Embedding(10, 4, sparse=True)
        self.phases = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x[:, 0].abs().long().clamp(max=9))
        return rows * self.scale + self.empty.sum() + (self.phases * (1 + 2j)).abs().sum()


def test_empty_sparse_complex_and_scalar_gradients_end_no_training(tmp_path: Path) -> None:
    torch.manual_seed(0)
    gradients = monitored(tmp_path, model=Unusual(), grad_level="L2")
    dump = tmp_path / "dump"

    assert len(gradients) == len(tables(dump)) == 3
    rows = tables(dump)[0]
    assert set(rows) == {"empty", "table.weight", "phases", "scale"}
    assert (rows["empty"]["max"], rows["empty"]["norm"], rows["empty"]["shape"]) == ("nan", "0.0", "[0, 3]")
    dense = gradients[0]["table.weight"].to_dense()
    np.testing.assert_array_equal(directions(dump, 0, "table.weight"), (dense > 0).numpy())
    assert float(rows["table.weight"]["=0"]) == (dense == 0).double().mean().item()
    real = torch.view_as_real(gradients[0]["phases"])
    np.testing.assert_array_equal(directions(dump, 0, "phases"), (real > 0).numpy())
    assert directions(dump, 0, "empty").shape == (0, 3)
    assert directions(dump, 0, "scale").shape == ()
    assert directions(dump, 0, "scale") == bool(gradients[0]["scale"] > 0)
    shares = [float(rows["scale"][key]) for key in ("(-inf, -1]", "(-1, 0]", "(0, 1]", "(1, inf)")]
    assert sorted(shares) == [0, 0, 0, 1]


NAMES = [
    "权重",
    "with space",
    "..",
    "a/b",
    "../../outside",
    "con",
    "x" * 300,
    "x" * 300 + "y",
    'quo"te,comma',
    "line\nfeed",
]


def test_any_name_of_a_parameter_is_written_and_none_leaves_the_directory(tmp_path: Path) -> None:
    model = nn.Module()
    for name in NAMES:
        model._parameters[name] = nn.Parameter(torch.randn(3))
    model.forward = lambda x: sum(one.square().sum() for one in model.parameters())  # type: ignore[assignment]
    debugger = PrecisionDebugger(configuration(tmp_path))
    debugger.monitor(model)
    model(None).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    debugger.stop()

    (rows,) = tables(tmp_path / "dump")
    assert list(rows) == NAMES
    files = [tmp_path / "dump" / "rank0" / "step0" / f"{file_name(name)}.npy" for name in NAMES]
    assert len({*files}) == len(NAMES)
    assert all(path.is_file() for path in files)
    assert {path.name for path in tmp_path.iterdir()} == {"dump", "dump.json"}


def test_a_name_that_is_a_file_name_is_one(tmp_path: Path) -> None:
    monitored(tmp_path, steps=1)
    assert {path.name for path in (tmp_path / "dump" / "rank0" / "step0").iterdir()} == {
        "fc.weight.npy", "fc.bias.npy", "head.weight.npy"
    }  # fmt: skip


def test_parameters_are_called_what_the_wrapped_model_calls_them(tmp_path: Path) -> None:
    model = nn.DataParallel(small())
    monitored(tmp_path, model=model, param_list=["module.fc.weight", "head.weight"])
    assert list(tables(tmp_path / "dump")[0]) == ["module.fc.weight", "module.head.weight"]


@pytest.mark.parametrize("fused", [False, True])
def test_a_loss_scaler_is_divided_out_and_steps_that_it_skips_are_none(tmp_path: Path, *, fused: bool) -> None:
    model = small()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    debugger = PrecisionDebugger(configuration(tmp_path, grad_level="L2", bounds=[-0.05, 0.05]))
    debugger.monitor(model)
    expected = []
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 6)).square().mean()).backward()
        gradient = model.fc.weight.grad
        assert gradient is not None
        if step in (0, 3):
            gradient[0, 0] = float("inf")
        else:
            expected.append((gradient / scaler.get_scale()).clone())
        scaler.step(optimizer)
        scaler.update()
    debugger.stop()

    found = tables(tmp_path / "dump")
    assert len(found) == len(expected) == 3
    for step, (rows, gradient) in enumerate(zip(found, expected, strict=True)):
        row = rows["fc.weight"]
        assert float(row["max"]) == gradient.max().item()
        assert float(row["(-inf, -0.05]"]) == (gradient <= -0.05).double().mean().item()
        np.testing.assert_array_equal(directions(tmp_path / "dump", step, "fc.weight"), (gradient > 0).numpy())


def test_files_of_an_earlier_run_are_refused(tmp_path: Path) -> None:
    monitored(tmp_path, steps=5)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.csv")}
    with pytest.raises(traindiff.ConfigError, match=r"already holds gradients of another run \(rank0\)"):
        monitored(tmp_path, steps=1)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.csv")} == before


def test_files_of_an_earlier_run_are_really_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    monitored(tmp_path, steps=5)
    monitored(tmp_path, steps=2, overwrite=True)

    assert len(tables(tmp_path / "dump")) == 2
    assert {path.name for path in (tmp_path / "dump" / "rank0").glob("step*")} == {"step0", "step1"}


def test_what_is_not_of_the_monitor_is_never_removed(tmp_path: Path) -> None:
    thesis = tmp_path / "dump" / "rank0" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.touch()
    with pytest.raises(traindiff.ConfigError, match=r"rank0/thesis\.tex"):
        monitored(tmp_path, overwrite=True)
    assert thesis.exists()


def test_no_unfinished_file_is_left_and_none_is_seen_half_written(tmp_path: Path) -> None:
    seen: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.is_set():
            seen.extend(len(table(path)) for path in tmp_path.rglob("grad_summary_*.csv"))

    thread = threading.Thread(target=watch)
    thread.start()
    monitored(tmp_path, steps=30)
    ended.set()
    thread.join()

    assert {*seen} == {3}
    assert not list(tmp_path.rglob("*.unfinished"))


def test_a_traced_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match=r"torch\.jit"):
        traced = torch.jit.trace(small(), torch.ones(1, 6))
    with pytest.raises(traindiff.ConfigError, match="Give the model that was traced"):
        PrecisionDebugger(configuration(tmp_path)).monitor(traced)
    assert not (tmp_path / "dump").exists()


def test_what_is_of_mindspore_and_no_optimizer_is_refused(tmp_path: Path) -> None:
    cell = type("Dense", (), {"__module__": "mindspore.nn.layer.basic"})()
    with pytest.raises(traindiff.ConfigError, match=r"is given a Dense of MindSpore.*\n.*Give the optimizer"):
        PrecisionDebugger(configuration(tmp_path)).monitor(cell)
    assert not (tmp_path / "dump").exists()


@pytest.mark.parametrize("wrong", [None, {"model": 1}, torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)])
def test_what_is_no_model_is_refused(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(traindiff.ConfigError, match=r"Give the m"):
        PrecisionDebugger(configuration(tmp_path)).monitor(wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "dump").exists()


def test_a_misspelt_parameter_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(traindiff.ConfigError, match=r'Did you mean "fc\.weight"\?') as error:
        monitored(tmp_path, param_list=["fc.wieght", "head.weight", "tail"])
    assert '"tail" is no parameter' in str(error.value)
    assert not (tmp_path / "dump").exists()


@pytest.mark.parametrize("ranks", [[1], [0, "2-3"]])
def test_a_single_process_has_no_ranks_to_choose(tmp_path: Path, ranks: list[int | str]) -> None:
    with pytest.warns(traindiff.TraindiffWarning, match=r'a single process, so "rank" in .* has no effect\. .*rank0'):
        monitored(tmp_path, rank=ranks)
    assert len(tables(tmp_path / "dump")) == 3


def test_a_single_process_is_rank_0_and_may_be_chosen(tmp_path: Path) -> None:
    monitored(tmp_path, rank=[0])
    assert len(tables(tmp_path / "dump")) == 3


def test_a_rank_that_there_is_not_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(traindiff.ConfigError, match="there are ranks 0 to 1"):
        monitored(tmp_path, rank=[0, "2-3"])
    assert not (tmp_path / "dump").exists()


def test_names_in_param_list_are_no_patterns(tmp_path: Path) -> None:
    model = Small()
    model.register_parameter("fc[weight]", nn.Parameter(torch.zeros(1)))
    with pytest.raises(traindiff.ConfigError, match=r'"fc\.\*" is no parameter'):
        monitored(tmp_path, model=model, param_list=["fc[weight]", "fc.*"])


def test_a_full_disk_ends_the_files_and_not_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from traindiff.compat.msprobe import exporting

    def full(_path: Path, _content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "put", full)
    with pytest.warns(traindiff.TraindiffWarning, match="No space left"):
        assert len(monitored(tmp_path)) == 3
