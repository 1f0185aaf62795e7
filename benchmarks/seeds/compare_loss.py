"""compare_loss.py beside `traindiff verify --like compare_loss`, with the same weights and batches on two ranks.

The original is no package: its repository is cloned with git. `COMPARE_LOSS` names another copy of the repository. It
needs GPUs and NCCL. Here it runs on CPUs over gloo, so its test for their versions is left out.

As a program, this is one rank of the original: `python -m benchmarks.seeds.compare_loss FOLDER OUTPUT [OPTIONS]`.
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from benchmarks.seeds.environments import ROOT, clone_of
from benchmarks.seeds.table import Feature, compared, differing
from torch import Tensor, distributed, nn
from torch.nn import functional

from traindiff import Training
from traindiff.run.verify.investigate import losses_of

TITLE = "compare_loss.py: is ZeRO right?"
PACKAGES: tuple[str, ...] = ()
"""Both run in traindiff's own environment, which has DeepSpeed."""

REPOSITORY = "https://github.com/tohtana/validate_zero"
COMMIT = "dc65878ce2acb8aa8889982199b7cef0fa66c387"

DATA = "COMPARE_LOSS_DATA"
"""Environment variable with the folder of the weights and batches of an original run, for the recipes."""

MOST_SECONDS = 1800
LEARNING_RATE = 0.015
SAME_LOSS = 1e-6
"""Largest relative difference between a loss there and here: float32 losses of one sample, averaged over ranks."""

_ROUNDED = 0.02
"""The same in bfloat16, of which torch's autocast rounds other tensors than ZeRO: five of its units roundoff."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What came out of a run.

    Attributes:
        code: Its exit code.
        losses: Of baseline and candidate, by iteration: means over ranks and micro-batches.
        said: Its output.
    """

    code: int
    losses: tuple[list[float], list[float]]
    said: str

    @property
    def last(self) -> str:
        """The last line with text, which names an error; its beginning if it is long."""
        lines = (line.strip() for line in reversed(self.said.replace(str(Path.home()), "~").splitlines()))
        return shorten(next(filter(None, lines), ""), width=160, placeholder=" ...")


def features(original: Path | None) -> list[Feature]:
    """Run every documented use with both, and compare exit codes and losses."""
    folder, python = clone_of(REPOSITORY, COMMIT, variable="COMPARE_LOSS"), original or Path(sys.executable)
    found = []
    with tempfile.TemporaryDirectory() as place:
        trained = Path(place)
        for number, (name, given, row, nproc, candidate) in enumerate(_USES):
            data = Path(place) / str(number)
            data.mkdir()
            theirs = run_original(python, folder, data, given.split(), nproc=nproc, is_wrong=bool(candidate))
            if any(data.glob("rank-*.pt")):
                trained = data  # if it fails before it trains, the replacement gets the batches of the use before
            ours = run_replacement(trained, data / "ours", given.split(), nproc=nproc, candidate=candidate)
            found.append(row(name, theirs, ours))
            print(found[-1], file=sys.stderr, flush=True)
    return found


def run_original(
    python: Path, folder: Path, data: Path, given: Sequence[str], *, nproc: int, is_wrong: bool
) -> Run:  # fmt: skip
    """Run the original under torch's launcher; it leaves its weights, batches and losses in `data`."""
    module = ["-m", "benchmarks.seeds.compare_loss", str(folder), str(data), *[_WRONG] * is_wrong]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    done = _run([str(python), *launcher, *module, *given], data)
    files = sorted(data.glob("rank-*.json"))
    ranks = [json.loads(file.read_text()) for file in files]
    said = ranks[0]["error"] if ranks else done.stderr
    losses = [
        [sum(one) / nproc for one in zip(*(rank["losses"][side] for rank in ranks), strict=False)] for side in (0, 1)
    ]
    return Run(code=done.returncode, losses=(losses[0], losses[1]), said=said)


def run_replacement(data: Path, output: Path, given: Sequence[str], *, nproc: int, candidate: str) -> Run:
    """Run the same options with `--like compare_loss`, and read the losses from the recordings."""
    command = [
        sys.executable, "-m", "traindiff", "verify", f"{__spec__.name}:recipe", "--like", "compare_loss",
        "--nproc", str(nproc), "--output", str(output), "--pin", "never", "--no-repeat", *given,
        *(["--candidate", f"{__spec__.name}:{candidate}"] if candidate else []),
    ]  # fmt: skip
    done = _run([one for one in command if one != _CLIPPING], data)
    losses = [list(losses_of(str(output / side)).values()) for side in ("baseline", "candidate")]
    logs = output / "logs" / "candidate" / "compiler.txt"
    said = done.stdout + done.stderr + (logs.read_text() if logs.exists() else "")
    return Run(code=done.returncode, losses=(losses[0], losses[1]), said=said)


def _run(command: Sequence[str], data: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", DATA: str(data),
    }  # fmt: skip
    return subprocess.run(
        command, cwd=data, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
    )


_WRONG, _CLIPPING = "--with-a-wrong-update", "--with-the-clipping-of-deepspeed"
"""Options of the program here: a fault, and DeepSpeed's own `gradient_clipping`, which is 1.0 since 0.19.3."""


def recipe() -> Training:
    """The original's training: its weights, and the batches of all its ranks, micro-batch by micro-batch."""
    return _training(LEARNING_RATE)


def wrong() -> Training:
    """The same with another learning rate."""
    return _training(1.5 * LEARNING_RATE)


def _training(rate: float) -> Training:
    files = sorted(Path(os.environ[DATA]).glob("rank-*.pt"))
    ranks = [torch.load(file, weights_only=True) for file in files]
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    weight = model[0].weight
    assert isinstance(weight, Tensor)
    with torch.no_grad():
        weight.copy_(ranks[0]["weight"])
    batches = [
        tuple(torch.cat([part[kind] for micro in zip(*parts, strict=True) for part in micro]) for kind in range(2))
        for parts in zip(*(rank["batches"] for rank in ranks), strict=True)
    ]

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(batch[0]).float(), batch[1])

    return Training(
        model=model, optimizer=torch.optim.Adam(model.parameters(), lr=rate), batches=batches, loss=loss
    )  # fmt: skip


Row = Callable[[str, Run, Run], Feature]


def agrees(name: str, theirs: Run, ours: Run) -> Feature:
    """A row for runs that both pass, or both fail, with the same losses."""
    problem = _different_losses(theirs, ours)
    if bool(theirs.code) != bool(ours.code):
        problem = f"the original exits with {theirs.code} ({theirs.last}), and verify with {ours.code}: {ours.last}"
    ends = "both pass" if not ours.code else f"both fail: there {theirs.last!r}, here {_verdict(ours)!r}"
    return compared(name, problem, f"{ends}; {_same(ours)}")


def passes_here(why: str, *, trains: bool = True, same: float | None = None) -> Row:
    """A row for a use in which the original fails though nothing is wrong.

    Args:
        why: The reason why it fails.
        trains: It fails after it has trained.
        same: Largest relative difference of losses; None for `SAME_LOSS`.
    """

    def row(name: str, theirs: Run, ours: Run) -> Feature:
        problem = "" if theirs.code and not ours.code else f"exit codes {theirs.code} and {ours.code}: {ours.last}"
        if trains:
            problem = problem or _different_losses(theirs, ours, at_most=1, same=same)
        return differing(name, problem, f"the original fails ({theirs.last}), here {_verdict(ours)!r}: {why}")

    return row


def refused(why: str) -> Row:
    """A row for a use that this machine cannot run: the original fails on the way, and verify says why at once."""

    def row(name: str, theirs: Run, ours: Run) -> Feature:
        problem = "" if theirs.code and ours.code == 2 and why in ours.said else f"verify said: {ours.said}"
        return compared(name, problem, f"no rank of this machine can run it: {theirs.last!r} there, {why!r} here")

    return row


def logs_compiling(name: str, theirs: Run, ours: Run) -> Feature:
    """A row for `--verbose_logging`."""
    problem = "" if re.search(r"\d+ guards", ours.said) and "__guards" in ours.said else "no guard was logged"
    return compared(name, problem or agrees(name, theirs, ours).note * (bool(theirs.code) != bool(ours.code)), (
        f"guards, recompilations and graph breaks are in compiler.txt, and counted in the report; {_same(ours)}"
    ))  # fmt: skip


def _different_losses(theirs: Run, ours: Run, *, at_most: int | None = None, same: float | None = None) -> str:
    for side, there, here in zip(("baseline", "candidate"), theirs.losses, ours.losses, strict=True):
        common = list(zip(there, here, strict=False))[:at_most]
        if not common:
            return f"there are no losses of the {side} to compare: {ours.last}"
        for number, (one, other) in enumerate(common):
            if abs(one - other) > (same or SAME_LOSS) * max(1.0, abs(one)):
                return f"the {side}'s loss in iteration {number} is {one!r} there, and {other!r} here"
    return ""


def _same(ours: Run) -> str:
    return f"the losses of both sides are the same in {len(ours.losses[0])} iterations"


def _verdict(ours: Run) -> str:
    words = "identical|equivalent|diverged|incomplete|misaligned"
    found = re.search(rf"^(?:{words})\b.*$", ours.said, re.MULTILINE)
    return found[0] if found else ours.last


_EXACT = "--use_torch_adam --dtype torch.float32 --zero_stage"
_CLIPPED = (
    "DeepSpeed clips gradients by default since 0.19.3, and the original does not say otherwise; verify does. "
    "In the rows below clipping is off for both"
)
_HALF = (
    "it compares float16 losses with those of another dtype, which torch refuses. The losses of its first iteration "
    "are those here, within the rounding of bfloat16"
)
_OFFLOADED = "DeepSpeed refuses torch's Adam with offloading unless its configuration allows it, as that of verify does"

_USES: tuple[tuple[str, str, Row, int, str], ...] = (
    ("`--use_torch_adam --dtype torch.float32`, as it is", f"{_EXACT} 1 {_CLIPPING}", passes_here(_CLIPPED), 2, ""),
    *((f"`{_EXACT} {stage}`", f"{_EXACT} {stage}", agrees, 2, "") for stage in range(4)),
    ("`--rtol 0 --atol 0`: no tolerance", f"{_EXACT} 1 --rtol 0 --atol 0", agrees, 2, ""),
    ("a wrong update fails", f"{_EXACT} 1 --iterations 3", agrees, 2, "wrong"),
    ("DeepSpeed's own Adam, without `--use_torch_adam`", "--zero_stage 1", agrees, 2, ""),
    ("`--offload_device cpu`", "--zero_stage 2 --offload_device cpu", agrees, 2, ""),
    ("`--offload_device cpu` with `--use_torch_adam`", f"{_EXACT} 2 --offload_device cpu",
     passes_here(_OFFLOADED, trains=False), 2, ""),
    ("`--offload_device nvme`", "--zero_stage 3 --offload_device nvme", refused("libaio"), 2, ""),
    (
        "`--gradient_accumulation_steps 4 --iterations 3`",
        f"{_EXACT} 2 --gradient_accumulation_steps 4 --iterations 3", agrees, 2, "",
    ),
    ("`--dtype torch.bfloat16 --rtol 0.05 --atol 0.2`",
     "--use_torch_adam --dtype torch.bfloat16 --rtol 0.05 --atol 0.2", passes_here(_HALF, same=_ROUNDED), 2, ""),
    ("`--dtype torch.float16 --rtol 0.05 --atol 0.2`", "--dtype torch.float16 --rtol 0.05 --atol 0.2",
     refused("float16"), 2, ""),
    ("`--compile --use_torch_adam --dtype torch.float32 --zero_stage 1`", f"--compile {_EXACT} 1", agrees, 2, ""),
    ("`--compile --deepcompile --zero_stage 3`", "--compile --use_torch_adam --deepcompile --zero_stage 3",
     refused("deepcompile"), 2, ""),
    ("`--compile --verbose_logging --zero_stage 1` on one rank",
     f"--compile --verbose_logging {_EXACT} 1", logs_compiling, 1, ""),
)  # fmt: skip
"""A row for each documented option and example: name, options, how it is judged, ranks, and a wrong candidate."""


def rank_of_original(folder: str, output: str, given: Sequence[str]) -> None:
    """Run the original's `main` on this rank, and keep what it trained on, its losses and its error."""
    sys.path.insert(0, folder)
    warnings.simplefilter("ignore")
    import deepspeed

    ops: Any = import_module("deepspeed.ops")
    ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it takes minutes
    distributed.init_process_group("gloo")
    deepspeed.init_distributed = lambda **_: None
    common, script = import_module("common"), import_module("compare_loss")
    common.bf16_required_version_check = script.bf16_required_version_check = lambda: True
    autocast, made = torch.autocast, common.DDP
    torch.autocast = lambda **settings: autocast(**{**settings, "device_type": "cpu"})  # type: ignore[misc,assignment]
    common.DDP = lambda model, **_: made(model)
    if _CLIPPING not in given:
        initialize = deepspeed.initialize
        deepspeed.initialize = lambda config, **settings: initialize(
            config={**config, "gradient_clipping": 0.0}, **settings
        )
    kept: dict[str, Any] = {"batches": []}
    losses: tuple[list[float], list[float]] = ([], [])
    if _WRONG in given:
        adam = torch.optim.Adam
        torch.optim.Adam = lambda parameters, lr: adam(parameters, lr=1.5 * lr)  # type: ignore[misc,assignment]
    for name in ("train_amp", "train_no_amp"):
        setattr(common, name, _keeping(getattr(common, name), kept))
    torch.allclose = _noting(torch.allclose, losses)  # type: ignore[assignment]
    error = ""
    sys.argv[1:] = [one for one in given if one not in (_WRONG, _CLIPPING)]
    try:
        with redirect_stdout(io.StringIO()):
            arguments = script.get_args()
            if arguments.verbose_logging:
                script.setup_compilation_debugging()
                script.debug_guard_failures()
            script.main(arguments)
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"
        raise
    finally:
        place = Path(output) / f"rank-{distributed.get_rank()}"
        if kept["batches"]:
            torch.save(kept, place.with_suffix(".pt"))
        means = [[total / len(kept["batches"][0]) for total in side] for side in losses]
        place.with_suffix(".json").write_text(json.dumps({"losses": means, "error": error}))
    distributed.destroy_process_group()


def _keeping(train: Callable[..., None], kept: dict[str, Any]) -> Callable[..., None]:
    """The original's function that trains on a batch, which now keeps the weights and its batch first."""

    def keep(model: nn.Module, *rest: Any) -> None:
        if "weight" not in kept:
            kept["weight"] = next(model.parameters()).detach().clone()
        first = next(number for number, one in enumerate(rest) if isinstance(one, list))
        kept["batches"].append([(x.clone(), y.clone()) for x, y in zip(rest[first], rest[first + 1], strict=True)])
        train(model, *rest)

    return keep


def _noting(allclose: Callable[..., bool], losses: tuple[list[float], list[float]]) -> Callable[..., bool]:
    """The function with which the original compares losses, then parameters: it now notes the losses first."""

    def noting(baseline: Tensor, target: Tensor, **tolerances: Any) -> bool:
        if not baseline.ndim:
            for side, loss in zip(losses, (baseline, target), strict=True):
                side.append(float(loss))
        return allclose(baseline, target, **tolerances)

    return noting


if __name__ == "__main__":
    rank_of_original(sys.argv[1], sys.argv[2], sys.argv[3:])
