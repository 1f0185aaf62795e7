"""ModelStepper beside `traindiff.compat.deepspeed`, with the same DeepSpeed engines on two ranks.

The original is no package: its repository is cloned with git. `MODEL_STEPPER` names another copy of the repository.
As a program, it runs every training below with one of both, and writes what came out as JSON:
`python -m benchmarks.seeds.model_stepper ORIGINAL.py`, or without an argument for the replacement. With `--launched`
it is one rank that a launcher has started, and runs the training that fails.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from importlib import util
from pathlib import Path
from typing import Any

import torch
from benchmarks.seeds.environments import ROOT, clone_of
from benchmarks.seeds.running import results_of
from benchmarks.seeds.table import Feature, compared, differing
from tests.on_ranks import RanksError, run_on_ranks
from torch import Tensor, distributed, nn
from torch.nn import functional

from traindiff.run.processes.launch import free_port

TITLE = "DeepSpeed: ModelStepper"
PACKAGES: tuple[str, ...] = ()
"""Both run in traindiff's own environment, which has DeepSpeed."""

REPOSITORY = "https://github.com/ShadenSmith/ModelStepper"
COMMIT = "1e81e044a60d1f749504958855f3d7924bf1c9e7"

MODULE = "benchmarks.seeds.model_stepper"
RANKS = 2
HANGS_SECONDS = 180
"""After so long, a training of some milliseconds hangs; DeepSpeed's start alone may take a minute."""

LAUNCHED_SECONDS = 900

SIZE_ERROR = 0.3
"""traindiff estimates sizes of differences from sketches of 64 numbers: three standard deviations of 10 %."""

Run = dict[str, Any]
"""One training on one rank: `go` (what it returned), `error`, `lines`, and what else the case adds."""

Ranks = list[Run]
Found = dict[str, Ranks]


def features(original: Path | None) -> list[Feature]:
    """Compare what both returned and printed, line by line."""
    file = str(clone_of(REPOSITORY, COMMIT, variable="MODEL_STEPPER") / "ModelStepper.py")
    python = original or Path(sys.executable)
    with tempfile.TemporaryDirectory() as folder:
        theirs, ours = (
            {**results_of(python, MODULE, *which, folder=Path(folder)), "launched": _launched(python, *which)}
            for which in ([file], [])
        )
    return [row(theirs, ours) for row in _rows()]


def _launched(python: Path, *which: str) -> Ranks:
    """The training that fails, under DeepSpeed's launcher; the lines of all ranks come through one pipe."""
    launcher = ["-m", "deepspeed.launcher.runner", f"--master_port={free_port()}", "--num_gpus", str(RANKS), "--module"]
    process = subprocess.Popen(
        [str(python), *launcher, MODULE, "--launched", *which],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=LAUNCHED_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the ranks
        return [{"go": None, "error": "TimeoutExpired", "lines": []}]
    lines = [line for line in said.splitlines() if not line.startswith("[")]  # without the launcher's own
    return [{"go": process.returncode == 0, "error": "", "lines": lines}]


class Net(nn.Module):
    """A small model that computes its loss.

    Args:
        factor: Its loss is multiplied by it, on `ranks` only.
        ranks: These ranks.
        bad_batch: Number of the batch whose loss is NaN.
        in_place: It changes its input.
    """

    def __init__(
        self, *, factor: float = 1.0, ranks: Sequence[int] = (0, 1), bad_batch: int = -1, in_place: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 4)
        self.factor = factor if distributed.get_rank() in ranks else 1.0
        self.bad_batch = bad_batch
        self.in_place = in_place
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        """[batch, 8], [batch] -> the loss."""
        bad = self.calls == self.bad_batch
        self.calls += 1
        if self.in_place:
            x.mul_(0.5)
        labels = torch.zeros(len(x), dtype=torch.long) if y is None else y
        loss = functional.cross_entropy(self.head(functional.relu(self.hidden(x))), labels)
        return loss * (float("nan") if bad else self.factor)


def batches(num: int) -> list[list[Tensor]]:
    """This rank's batches."""
    data = torch.Generator().manual_seed(1 + distributed.get_rank())
    return [[torch.randn(4, 8, generator=data), torch.randint(4, (4,), generator=data)] for _ in range(num)]


def engine(
    stage: int = 1, *, lr: float = 1e-2, gradients: float = 1.0, sgd: bool = False, config: Any = None, **net: Any
) -> Any:
    """A DeepSpeed engine; `gradients` multiplies its gradients."""
    import deepspeed

    model = Net(**net)
    made = torch.optim.SGD if sgd else torch.optim.Adam
    if gradients != 1.0:
        for parameter in model.parameters():
            parameter.register_hook(lambda found: found * gradients)
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    found, *_ = deepspeed.initialize(
        model=model, optimizer=made(model.parameters(), lr=lr),
        config={
            "train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True, "steps_per_print": None, **(config or {}),
        },
    )  # fmt: skip
    return found


def train(stepper: Any, base: Any, test: Any, data: Any = None, **settings: Any) -> Run:
    """Train with the original or the replacement, and keep what came out."""
    said = io.StringIO()
    found: Run = {"go": None, "error": ""}
    with redirect_stdout(said):
        try:
            found["go"] = stepper(base, test, batches(8) if data is None else data, **settings).go()
        except Exception as error:  # noqa: BLE001  what it raises is a result
            found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return {**found, "lines": said.getvalue().splitlines()}


def parameters(*engines: Any) -> list[list[float]]:
    """The values of their parameters."""
    return [[float(value) for one in made.module.parameters() for value in one.detach().flatten()] for made in engines]


def trained_alone(made: Any, num: int) -> list[list[float]]:
    """The parameters of an engine after the loop that its documentation shows."""
    for batch in batches(num):
        loss = made(*batch)
        made.backward(loss)
        made.step()
    return parameters(made)


def arguments_of(batch: dict[str, Tensor]) -> list[Tensor]:
    """A function of the user's that the original calls `batch_data_fn`."""
    return [batch["images"] * 2.0, batch["labels"]]


def in_dicts() -> list[dict[str, Tensor]]:
    """Batches that only `arguments_of` can read."""
    return [{"images": x, "labels": y} for x, y in batches(4)]


def _alike(stepper: Any) -> Run:
    base, test = engine(), engine()
    found = train(stepper, base, test, num_batches=6, status_every=2)
    return {**found, "parameters": parameters(base, test)}


def _as_alone(stepper: Any) -> Run:
    base = engine(0, config={"gradient_clipping": 0.1})
    found = train(stepper, base, engine(0, config={"gradient_clipping": 0.1}), batches(3), num_batches=3)
    alone = engine(0, config={"gradient_clipping": 0.1})
    return {**found, "parameters": parameters(base), "alone": trained_alone(alone, 3)}


def _signature(stepper: Any) -> Run:
    given = inspect.signature(stepper).parameters.values()
    return {"arguments": [[one.name, str(one.default)] for one in given]}


def _attributes(stepper: Any) -> Run:
    made = stepper(engine(), engine(lr=0.0), batches(4), num_batches=4)
    names = ("num_batches", "test_every", "status_every", "track_params", "track_loss", "track_grads", "param_tol",
             "loss_tol", "grad_tol", "batch_data_fn", "global_rank")  # fmt: skip
    found = {"values": [str(getattr(made, name)) for name in names]}
    made.track_params, made.track_grads, made.loss_tol = False, False, 10.0
    with redirect_stdout(io.StringIO()):
        passed = made.go()
    return {**found, "go": passed, "losses": [f"{float(made.base_loss):.5f}", f"{float(made.test_loss):.5f}"]}


FAILING = {"lr": 0.0}
"""The tested engine of the documented failure."""

ONLY_LOSS: dict[str, Any] = {"track_params": False, "track_grads": False, "loss_tol": 1e-7}

CASES: dict[str, Callable[[Any], Run]] = {
    "signature": _signature,
    "attributes": _attributes,
    "alike": _alike,
    "as alone": _as_alone,
    "fails": lambda one: train(one, engine(), engine(**FAILING)),
    "short": lambda one: train(one, engine(), engine(), batches(3), num_batches=5),
    "exact": lambda one: train(one, engine(), engine(), batches(6), num_batches=6, status_every=5),
    "default": lambda one: train(one, engine(), engine(), batches(12)),
    "empty": lambda one: train(one, engine(), engine(), [], num_batches=5),
    "wide": lambda one: train(one, engine(), engine(**FAILING), param_tol=10.0, grad_tol=10.0, loss_tol=10.0),
    "loss": lambda one: train(one, engine(), engine(factor=1.5)),
    "loss, wide": lambda one: train(one, engine(), engine(factor=1.5), num_batches=1, loss_tol=0.6, grad_tol=9.0),
    "gradients": lambda one: train(one, engine(), engine(gradients=1.5), param_tol=1e-3),
    "gradient line": lambda one: train(
        one, engine(), engine(**FAILING), track_params=False, track_loss=False, num_batches=3
    ),
    "nothing fails": lambda one: train(
        one, engine(), engine(**FAILING), track_params=False, track_grads=False, loss_tol=10.0
    ),
    "only parameters": lambda one: train(one, engine(), engine(**FAILING), track_loss=False, track_grads=False),
    "untracked": lambda one: train(one, engine(), engine(), batches(3), track_grads=False, grad_tol=1e-3),
    "every fourth": lambda one: train(
        one, engine(sgd=True), engine(sgd=True, **FAILING), num_batches=6, test_every=4, **ONLY_LOSS
    ),
    "the last": lambda one: train(
        one, engine(sgd=True), engine(sgd=True, **FAILING), num_batches=6, test_every=9, **ONLY_LOSS
    ),
    "batch_data_fn": lambda one: train(one, engine(), engine(), in_dicts(), num_batches=4, batch_data_fn=arguments_of),
    "clones": lambda one: train(one, engine(in_place=True), engine(in_place=True), batches(4), num_batches=4),
    "tuple": lambda one: train(one, engine(), engine(), [tuple(batch) for batch in batches(2)], num_batches=2),
    "tensor": lambda one: train(one, engine(), engine(), [x for x, _ in batches(2)], num_batches=2),
    "nan": lambda one: train(one, engine(), engine(bad_batch=1)),
    "stages 0, 1": lambda one: train(one, engine(0), engine(1)),
    "stages 1, 2": lambda one: train(one, engine(1), engine(2)),
    "stage 3": lambda one: train(one, engine(1), engine(3)),
    "stage 3 fails": lambda one: train(one, engine(3), engine(3, **FAILING)),
}
"""The trainings. Each one is run on all ranks."""


def _one_rank(stepper: Any) -> Run:
    """Only rank 1 sees that the losses differ."""
    return train(stepper, engine(), engine(factor=1.5, ranks=(1,)))


def _import_deepspeed() -> Any:
    warnings.simplefilter("ignore")  # DeepSpeed uses names of collectives that torch renames
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiled when first used, which takes minutes
    return deepspeed


def _on_rank(file: str, cases: Sequence[str]) -> dict[str, Run]:
    _import_deepspeed()
    stepper = _stepper(file)
    return {key: {**CASES, "one rank": _one_rank}[key](stepper) for key in cases}


def _stepper(file: str) -> Any:
    if not file:
        from traindiff.compat.deepspeed import ModelStepper

        return ModelStepper
    spec = util.spec_from_file_location("ModelStepper", file)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ModelStepper


def main(*arguments: str) -> int:
    """Run every training, and write the runs of all ranks by case."""
    which = [one for one in arguments if not one.startswith("--")]
    file = which[0] if which else ""
    if "--launched" in arguments:
        return _one_launched_rank(file)
    by_rank = run_on_ranks(_on_rank, RANKS, file, list(CASES), timeout_seconds=600)
    found = {key: [one[key] for one in by_rank] for key in CASES}
    try:
        alone = run_on_ranks(_on_rank, RANKS, file, ["one rank"], timeout_seconds=HANGS_SECONDS)
        found["one rank"] = [one["one rank"] for one in alone]
    except RanksError as error:
        found["one rank"] = [{"go": None, "error": str(error).splitlines()[0], "lines": []}] * RANKS
    print(json.dumps(found))
    return 0


def _one_launched_rank(file: str) -> int:
    _import_deepspeed().init_distributed("gloo", verbose=False)
    run = _on_rank(file, ["fails"])["fails"]
    for rank in reversed(range(RANKS)):  # through one pipe, rank 0's last
        if rank == distributed.get_rank():
            print(*run["lines"], sep="\n", flush=True)
        distributed.barrier()  # the launcher ends all ranks when the first one has failed
    return 0 if run["go"] else 1


def _outcome(runs: Ranks) -> list[Any]:
    return [run["error"].partition(":")[0] or run["go"] for run in runs]


def _lines(runs: Ranks, first: str) -> list[str]:
    """The lines of all ranks that begin so."""
    return [line for run in runs for line in run["lines"] if line.startswith(first)]


def _fields(line: str) -> dict[str, str]:
    return dict(field.rstrip(":").partition("=")[::2] for field in line.split() if "=" in field)


def _unequal(what: str, theirs: Any, ours: Any) -> str:
    """What is not equal; empty if both are."""
    return "" if theirs == ours else f"{what}: {theirs!r} in the original, {ours!r} here"


def _expected(theirs: Ranks, ours: Ranks, *, original: Any, replacement: Any) -> str:
    """Which outcome is another one than these on all ranks; empty if none is."""
    for who, runs, wanted in (("the original", theirs, original), ("the replacement", ours, replacement)):
        if _outcome(runs) != [wanted] * len(runs):
            reasons = " ".join(sorted({run["error"] for run in runs}))
            return f"{who} gave {_outcome(runs)}, and not {wanted} on each rank. {reasons}".strip()
    return ""


def _far(theirs: Sequence[str], ours: Sequence[str], *, relative: float) -> str:
    """The first field of the original's lines that differs here; sizes of differences may be `relative` apart."""
    if len(theirs) != len(ours):
        return f"{len(theirs)} lines in the original, {len(ours)} here"
    for one, other in zip(sorted(theirs), sorted(ours), strict=True):
        fields = _fields(other)
        for name, value in _fields(one).items():
            mine = fields.get(name, "nothing")
            if mine == value:
                continue
            accepted = relative * abs(float(value)) + (0.0 if "e" in value else 5e-6)  # the original's five decimals
            if name not in ("abs_diff", "rel_diff") or abs(float(mine) - float(value)) > accepted:
                return f"{name} is {value} in the original and {mine} here, in {one}"
    return ""


def _first_of_each_rank(runs: Ranks, what: str) -> list[str]:
    """The first line of a kind of each rank: the original ends a rank's test there."""
    lines = _lines(runs, f"DIVERGED {what}")
    return list({_fields(line)["rank"]: line for line in reversed(lines)}.values())


def _last_lines(theirs: Ranks, ours: Ranks) -> str:
    return _unequal("the last line of rank 0", theirs[0]["lines"][-1:], ours[0]["lines"][-1:])


def _configuration(runs: Ranks) -> list[str]:
    lines = list(runs[0]["lines"])
    begin = lines.index("--- Model Stepper Configuration ---")
    return lines[begin : lines.index("", begin)]


def _trained(runs: Ranks) -> list[Any]:
    return [[[round(value, 5) for value in one] for one in run["parameters"]] for run in runs]


def _passing(theirs: Ranks, ours: Ranks) -> str:
    return (
        _expected(theirs, ours, original=True, replacement=True)
        or _unequal("trained parameters", _trained(theirs), _trained(ours))
        or _last_lines(theirs, ours)
    )


def _failing(theirs: Ranks, ours: Ranks) -> str:
    kinds = [line.split()[0] for line in ours[0]["lines"] if line.startswith(("DIVERGED", "STATUS", "TEST"))]
    return (
        _expected(theirs, ours, original=False, replacement=False)
        or _far(_lines(theirs, "DIVERGED PARAMETER"), _first_of_each_rank(ours, "PARAMETER"), relative=SIZE_ERROR)
        or _unequal("STATUS", _lines(theirs, "STATUS"), _lines(ours, "STATUS"))
        or _unequal("order", ["DIVERGED", "STATUS", "TEST"], list(dict.fromkeys(kinds)))
        or _last_lines(theirs, ours)
    )


def _equal_status(theirs: Ranks, ours: Ranks) -> str:
    outcomes = _expected(theirs, ours, original=True, replacement=True)
    return outcomes or _unequal("STATUS", _lines(theirs, "STATUS"), _lines(ours, "STATUS"))


def _one_status_less(theirs: Ranks, ours: Ranks) -> str:
    own = _lines(theirs, "STATUS")
    last = [line for line in own if line.startswith("STATUS batch=10 / 10 ")]
    return _unequal("STATUS", [line for line in own if line not in last], _lines(ours, "STATUS")) or (
        "" if last else "the original did not print batch 10"
    )


def _same_losses(theirs: Ranks, ours: Ranks) -> str:
    outcomes = _expected(theirs, ours, original=False, replacement=False)
    return outcomes or _far(_lines(theirs, "DIVERGED LOSS"), _lines(ours, "DIVERGED LOSS"), relative=1e-3)


def _names_of_fields(theirs: Ranks, ours: Ranks) -> str:
    lines = [_first_of_each_rank(runs, "GRADIENT") for runs in (theirs, ours)]
    if not all(lines):
        return f"GRADIENT lines of {len(lines[0])} ranks in the original, of {len(lines[1])} here"
    told = [
        [(name, fields[name]) for name in ("rank", "batch", "grad_idx", "tol")]
        for fields in map(_fields, (lines[0][0], lines[1][0]))
    ]
    return _unequal("fields", *told) or _expected(theirs, ours, original=True, replacement=False)


def _ends_together(theirs: Ranks, ours: Ranks) -> str:
    if all(run["error"] == "" for run in theirs):
        return "the original ended"
    ranks = [_fields(line)["rank"] for line in _lines(ours, "DIVERGED LOSS")]
    return _unequal("outcome", [False] * RANKS, _outcome(ours)) or _unequal("ranks of the lines", ["1"], ranks)


def _each_rank_fails(theirs: Ranks, ours: Ranks) -> str:
    if any("DIVERGED PARAMETER" in line for run in theirs for line in run["lines"]):
        return "the original found it"
    ranks = sorted(_fields(line)["rank"] for line in _first_of_each_rank(ours, "PARAMETER"))
    return _unequal("outcome", [False] * RANKS, _outcome(ours)) or _unequal("ranks", ["0", "1"], ranks)


def _as_alone_only_here(theirs: Ranks, ours: Ranks) -> str:
    if any(run["parameters"] == run["alone"] for run in theirs):
        return "the original trains the engine as it would be trained alone"
    return "" if all(run["parameters"] == run["alone"] for run in ours) else "the engine is not trained as alone"


Check = Callable[[Ranks, Ranks], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row: the case that is compared, how, and what is said of it.

    Attributes:
        name: The feature.
        case: The training.
        check: Why the runs of original and replacement do not show what `note` says; empty if they do.
        note: What was compared.
        differs: The replacement does something else on purpose.
    """

    name: str
    case: str
    check: Check
    note: str
    differs: bool = False

    def __call__(self, theirs: Found, ours: Found) -> Feature:
        """The row, from the runs of both."""
        problem = self.check(theirs[self.case], ours[self.case])
        return (differing if self.differs else compared)(self.name, problem, self.note)


def _both(*, original: Any, replacement: Any) -> Check:
    return partial(_expected, original=original, replacement=replacement)


_SAME = _both(original=True, replacement=True)


def _rows() -> list[Row]:
    return [
        Row(name="`ModelStepper(...)`: names, order and defaults of the arguments", case="signature",
            check=lambda a, b: _unequal("arguments", a, b), note="`inspect.signature` is the same."),
        Row(name="Settings are attributes; `base_loss`, `test_loss`, `global_rank`", case="attributes",
            check=lambda a, b: _unequal("attributes", a, b),
            note="Their values; the outcome of `go()` after three were changed; both losses after it."),
        Row(name="`go()` trains on `num_batches` batches and returns True; `TEST PASSED`", case="alike", check=_passing,
            note="Two engines of stage 1: the returned value, the last line, and the trained parameters to 5 digits."),
        Row(name="`go()` returns False at the first divergence; `DIVERGED PARAMETER` for each rank; `TEST FAILED` "
            "(the demonstration's `--fail`)", case="fails", check=_failing,
            note="Fields of the first line of each rank, the `STATUS` line byte by byte, the order, the last line. The "
            "original prints a rank's first parameter, the replacement up to 8, with `name=`."),
        Row(name="The `deepspeed` launcher, and its exit code", case="launched", check=_failing,
            note="The same training and comparison, on two ranks that `deepspeed --num_gpus 2` starts."),
        Row(name="The printed configuration", case="alike",
            check=lambda a, b: _unequal("lines", _configuration(a), _configuration(b)), note="10 lines, byte by byte."),
        Row(name="`status_every`, and the last batch: `STATUS batch= / N base_loss= test_loss= abs_diff= rel_diff=`",
            case="exact", check=_equal_status, note="6 batches, `status_every=5`: lines byte by byte, as documented."),
        Row(name="The last `STATUS` line, if the loader has more batches", case="default", check=_one_status_less,
            differs=True, note="The original prints the losses of batch 9 again, as `batch=10 / 10`. The replacement "
            "prints them once, as its documentation shows. The other lines are equal, byte by byte."),
        Row(name="`num_batches`: 10 by default; N of `STATUS` also if the loader has fewer", case="short",
            check=_equal_status, note="3 of 5 batches: lines byte by byte."),
        Row(name="`param_tol`: relative L2 difference of each parameter", case="wide", check=_SAME,
            note="lr = 0 fails with the default (above), and passes with 10."),
        Row(name="`loss_tol`, `DIVERGED LOSS`", case="loss", check=_same_losses,
            note="Loss x 1.5: `rank`, `batch`, `base`, `test`, `abs_diff`, `rel_diff` and `tol` of both ranks."),
        Row(name="`loss_tol` above the difference", case="loss, wide", check=_SAME, note="Both pass."),
        Row(name="`track_grads`, `grad_tol`", case="gradients", check=_both(original=True, replacement=False),
            differs=True, note="All gradients x 1.5 under Adam: the original passes wrongly, because it reads "
            "parameters and ignores the result. The replacement compares gradients, and fails."),
        Row(name="`DIVERGED GRADIENT`", case="gradient line", check=_names_of_fields, differs=True,
            note="`rank`, `batch`, `grad_idx` and `tol` are equal. Sizes are those of the parameters in the original. "
            "It prints the line and then passes; the replacement fails."),
        Row(name="`track_params=False`, `track_grads=False`", case="nothing fails", check=_SAME,
            note="lr = 0 passes with both."),
        Row(name="`track_loss=False`, `track_grads=False`", case="only parameters", check=_failing,
            note="lr = 0 fails with the same lines."),
        Row(name="A tolerance beside `track_...=False`", case="untracked",
            check=lambda a, b: _equal_status(a, b) or _unequal("configuration", _configuration(a), _configuration(b)),
            note="`track_grads=False, grad_tol=1e-3` is accepted and printed: lines byte by byte."),
        Row(name="`test_every`", case="every fourth", check=_same_losses,
            note="Losses that differ from batch 1 on are found in batch 4."),
        Row(name="The last batch is tested whatever `test_every` says", case="the last", check=_same_losses,
            note="`test_every=9` and 6 batches: found in batch 5."),
        Row(name="`batch_data_fn`", case="batch_data_fn", check=_equal_status,
            note="Makes the arguments from dictionaries: the losses of 4 batches, byte by byte."),
        Row(name="A list's tensors are cloned and moved for each engine", case="clones", check=_equal_status,
            note="The model changes its input in place: the losses of 4 batches, byte by byte."),
        Row(name="A batch that is a tuple", case="tuple", check=_both(original="AttributeError", replacement=True),
            differs=True, note="The original raises AttributeError, the replacement takes it as a list."),
        Row(name="A batch that is a tensor", case="tensor", check=_both(original="TypeError", replacement=True),
            differs=True, note="The original gives each row as an argument and raises TypeError; the replacement gives "
            "the tensor."),
        Row(name="A loader without batches", case="empty", check=_both(original=True, replacement="ConfigError"),
            differs=True, note="The original prints `TEST PASSED`. The replacement raises ConfigError: nothing was "
            "compared."),
        Row(name="All ranks end together", case="one rank", check=_ends_together, differs=True,
            note="The loss differs on rank 1 only: the original hangs, because rank 1 leaves before its backward pass. "
            "The replacement prints rank 1's line, and ends on both."),
        Row(name="NaN", case="nan", check=_both(original=True, replacement=False), differs=True,
            note="The original passes wrongly: NaN exceeds no tolerance. The replacement fails."),
        Row(name="Stage 1 against stage 2", case="stages 1, 2", check=_equal_status, note="Lines byte by byte."),
        Row(name="Stage 0 against stage 1", case="stages 0, 1", check=_both(original=False, replacement=True),
            differs=True, note="The original fails falsely, because it never zeroes the gradients of stage 0."),
        Row(name="Stage 3", case="stage 3", check=_both(original="RuntimeError", replacement=True), differs=True,
            note="The original raises RuntimeError: its parameters have shape (0,). The replacement passes."),
        Row(name="Stage 3 that fails", case="stage 3 fails",
            check=_each_rank_fails,
            differs=True, note="The original crashes or compares empty tensors. The replacement fails with a line for "
            "each rank."),
        Row(name="The engines are trained as in a training loop", case="as alone", check=_as_alone_only_here,
            differs=True, note="Stage 0 with clipping: the original calls module and optimizer past the engine, and "
            "trains it otherwise. The replacement gives the parameters of the engine's own loop, bit by bit."),
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
