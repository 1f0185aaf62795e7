"""Gradients of compiled code are held against what the layers in it were given and returned."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import spectral_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import traindiff
from tests.observe.compile.compiling import torch_may_warn
from tests.observe.hooks.test_undisturbed import assert_bitwise_equal
from tests.on_ranks import run_on_ranks

pytestmark = [torch_may_warn, pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")]
release = partial(pytest.param, marks=pytest.mark.release)

OBSERVED = ("loss", "grad", "witness")
ALL_KNOWN = "Witnessed are the gradients of 100.0% of "


class Layers(nn.Module):
    """One layer of each kind that has an identity; two are called twice, and some are recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.narrow = nn.Conv1d(8, 8, 3, padding=1, groups=2)
        self.wide = nn.ConvTranspose1d(8, 8, 3, padding=1)
        self.batch_norm, self.group_norm = nn.BatchNorm1d(8), nn.GroupNorm(2, 8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8, bias=False))
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens).mT
        x = self.group_norm(self.wide(self.batch_norm(self.narrow(x)))).mT
        x = x + checkpoint(self.inner, self.norm(x), use_reentrant=False)
        return self.head(functional.relu(self.head(self.norm(x))))


class Frozen(nn.Module):
    """One layer that is trained, in front of several that are not; one of these trains its bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.ModuleList(nn.Linear(8, 8).requires_grad_(False) for _ in range(4))
        self.inner[0].bias.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for one in self.inner:
            x = torch.relu(one(1.5 * x) + x)
        return x


class Tied(nn.Module):
    """A layer whose weight is also used by a function, which nothing shows in compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.linear(self.inner(self.table(tokens)), self.table.weight)


def train(
    model: nn.Module, path: Path | None, *, call: Callable[..., Any], micro_steps: int = 1, dtype: str = "float32",
    steps: int = 4,
) -> dict[str, Any]:  # fmt: skip
    """Train a model, recorded at a path."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(0)

    def steps_of_it() -> None:
        for _ in range(steps):
            for _ in range(micro_steps):
                tokens = torch.randint(16, (6, 5), generator=batches)
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
                    loss = call(tokens).float().square().mean() / micro_steps
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    if path is None:
        steps_of_it()
    else:
        with traindiff.record(path, model, optimizer, observe=OBSERVED, strict=True):
            steps_of_it()
    return dict(model.state_dict())


def built(kind: type[nn.Module], dtype: str = "float32") -> nn.Module:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = kind()
    return model.bfloat16() if dtype == "bfloat16" else model


@pytest.mark.parametrize(
    ("backend", "dtype", "micro_steps"),
    [
        ("aot_eager", "float32", 3),
        ("aot_eager", "bfloat16", 1),
        ("aot_eager", "autocast", 2),
        release("aot_eager", "bfloat16", 3),
        release("inductor", "float32", 1),
        release("inductor", "bfloat16", 2),
        release("inductor", "autocast", 2),
    ],
)
def test_every_known_layer_is_witnessed(tmp_path: Path, backend: str, dtype: str, micro_steps: int) -> None:
    model = built(Layers, dtype)
    call = torch.compile(model, backend=backend, fullgraph=True)

    train(model, tmp_path / "run", call=call, micro_steps=micro_steps, dtype=dtype)

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient")
    assert (verdict.verdict, [*verdict.warnings]) == ("healthy", [])
    (share,) = verdict.notes
    assert share.startswith(ALL_KNOWN)


def test_the_training_computes_the_same_bits(tmp_path: Path) -> None:
    plain, recorded = (
        train(model, path, call=torch.compile(model, backend="aot_eager"))
        for path in (None, tmp_path / "run")
        for model in [built(Layers)]
    )

    assert_bitwise_equal(plain, recorded)


def test_a_use_that_nothing_shows_is_no_finding(tmp_path: Path) -> None:
    model = built(Tied)
    train(model, tmp_path / "run", call=torch.compile(model, backend="aot_eager", fullgraph=True))

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient")
    assert (verdict.verdict, [*verdict.warnings]) == ("healthy", [])
    share, contributed = verdict.notes
    assert share == "Witnessed are the gradients of 36.0% of 200 parameters."
    assert contributed.endswith(": table.weight.")


class WrongOnce:
    """A compiler whose code for backward passes computes one gradient wrongly, in one call."""

    def __init__(self, at: int, place: int, error: float) -> None:
        self.calls, self.at, self.place, self.error = 0, at, place, error

    def __call__(self, graph: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            found = [*graph(*args)]
            if self.calls == self.at:
                gradients = [one for one in found if isinstance(one, Tensor) and one.dtype.is_floating_point]
                wrong = gradients[self.place].clone()
                wrong.view(-1)[3] += self.error * float(wrong.norm())
                found = [wrong if one is gradients[self.place] else one for one in found]
            self.calls += 1
            return found

        return make_boxed_func(run)  # type: ignore[no-untyped-call]


def without_change(graph: Any, _inputs: Any) -> Any:
    return make_boxed_func(graph.forward)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(("kind", "at", "step", "micro_step"), [(Layers, 5, 2, 1), (Tied, 0, 0, 0)])
def test_a_gradient_that_it_computed_wrongly_once_is_told(
    tmp_path: Path, kind: type[nn.Module], at: int, step: int, micro_step: int
) -> None:
    model = built(kind)
    wrong = WrongOnce(at, place=0 if kind is Layers else 2, error=0.01)
    backend = aot_autograd(fw_compiler=without_change, bw_compiler=wrong)
    train(model, tmp_path / "run", call=torch.compile(model, backend=backend, fullgraph=True), micro_steps=2)

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient")
    assert wrong.calls == 8
    assert (verdict.verdict, [*verdict.warnings]) == ("healthy", [])
    path = "table.weight" if kind is Layers else "inner.bias"
    (note,) = [one for one in verdict.notes if one.startswith("In a step, compiled code contributed something else")]
    assert f" to the gradient of {path} than " in note
    found = re.search(r"unlike in 3 others \(step (\d), micro-step (\d): relative error (\S+); rounding", note)
    assert found is not None
    assert (int(found[1]), int(found[2])) == (step, micro_step)
    assert 0.003 < float(found[3]) < 0.03


def test_it_is_silent_of_what_the_graph_shows(tmp_path: Path) -> None:
    model = built(Layers)
    train(model, tmp_path / "run", call=torch.compile(model, backend="eager"))

    (first, *_) = traindiff.open_recording(tmp_path / "run").steps(0)
    found = {(one.path, one.slot) for one in first.observations if one.stage == "witness"}
    assert ("head.weight", "expected") in found
    assert ("head.weight", "layers") not in found


def on_ranks(path: str) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(Layers())
    torch.manual_seed(1 + torch.distributed.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call = torch.compile(model, backend="aot_eager")
    with traindiff.record(path, model, optimizer, observe=OBSERVED, strict=True):
        for step in range(3):
            call(torch.randint(16, (6, 5))).square().mean().backward()
            if step == 1:
                gradient = model.module.head.weight.grad
                assert isinstance(gradient, Tensor)
                gradient.data.mul_(1.5)
            optimizer.step()
            optimizer.zero_grad()


def test_ranks_add_up(tmp_path: Path) -> None:
    run_on_ranks(on_ranks, 2, str(tmp_path / "run"))

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient")
    assert [(one.step, one.path, one.message) for one in verdict.findings] == [
        (1, "head.weight", "The gradient is 1.5 x what the inputs and outputs of its layer give.")
    ]
    assert any(note.startswith(ALL_KNOWN) for note in verdict.notes)


def test_a_wrong_product_of_the_forward_pass_is_told_with_its_row(tmp_path: Path) -> None:
    calls = 0

    def wrong_once(graph: Any, _inputs: Any) -> Any:
        class Wrong(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                found = super().call_function(target, args, kwargs)
                if target is torch.ops.aten.addmm.default and calls == 2 and found.shape[1] == 8:
                    found[13, 2] += 0.5
                return found

        def run(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return Wrong(graph).run(*args)

        return make_boxed_func(run)  # type: ignore[no-untyped-call]

    model = built(Tied)
    backend = aot_autograd(fw_compiler=wrong_once, bw_compiler=without_change)
    train(model, tmp_path / "run", call=torch.compile(model, backend=backend, fullgraph=True))

    (finding,) = traindiff.check(tmp_path / "run", rules="product-wrong").findings
    assert (finding.step, finding.path, finding.phase) == (1, "inner", "forward")
    assert "in row (2, 3)" in finding.message


class Gated(nn.Module):
    """Uses a weight in a function, whose part is zero in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.gate = nn.Linear(8, 8), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * functional.linear(self.inner(x).tanh(), self.inner.weight)


class Teacher(nn.Module):
    """Calls its layers with other weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        other = {name: 1.5 * value for name, value in self.inner.named_parameters()}
        with torch.no_grad():
            target = torch.func.functional_call(self.inner, other, (x,))
        return self.inner(x) - target + torch.func.functional_call(self.inner, other, (x,))


class Ensemble(nn.Module):
    """Calls layers under vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(self.inner)(x.unflatten(0, (3, 2))) * self.scale[..., None]


class Modes(nn.Module):
    """Is in training mode when it is called, and not in its backward pass; a hook clips what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), spectral_norm(nn.Linear(8, 8)))

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x)
        if found.requires_grad:
            found.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return found * found


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
@pytest.mark.parametrize("backend", ["aot_eager", "eager"])
@pytest.mark.parametrize("kind", [Gated, Teacher, Ensemble, Modes])
def test_legal_trainings_are_healthy(tmp_path: Path, kind: type[nn.Module], backend: str) -> None:
    model = built(kind)
    call = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    with traindiff.record(tmp_path / "run", model, optimizer, observe=(*OBSERVED, "forward"), strict=True):
        for step in range(5):
            loss = call(torch.randn(6, 8, generator=generator)).square().mean()
            if step == 2:
                model.eval()
                with torch.no_grad():
                    call(torch.randn(6, 8, generator=generator))
                loss = loss * 0.0 if kind is Gated else loss
            loss.backward()
            model.train()
            optimizer.step()
            optimizer.zero_grad()

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient,product-wrong,product-inaccurate")
    assert (verdict.verdict, [*verdict.warnings]) == ("healthy", [])
    assert not [note for note in verdict.notes if note.startswith("In ")]


def test_the_inputs_of_layers_that_are_not_trained_are_not_kept(tmp_path: Path) -> None:
    def kept(*, recorded: bool) -> int:
        model = built(Frozen)
        found: dict[int, int] = {}
        session = (
            traindiff.record(tmp_path / "run", model, observe=OBSERVED, strict=True) if recorded else nullcontext()
        )
        with session:
            output = torch.compile(model, backend="aot_eager")(torch.randn(100, 8))
            for one in output.grad_fn.saved_tensors:
                found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        return sum(found.values())

    assert kept(recorded=True) <= kept(recorded=False) + 100


def test_selective_checkpointing_around_compiled_layers(tmp_path: Path) -> None:
    model: Any = built(Layers).inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.compile(backend="aot_eager")
    chosen = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    with traindiff.record(tmp_path / "run", model, optimizer, observe=(*OBSERVED, "forward"), strict=True):
        for _ in range(2):
            checkpoint(model, torch.randn(6, 8), use_reentrant=False, context_fn=chosen).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient,product-wrong")
    assert (verdict.verdict, [*verdict.warnings]) == ("healthy", [])


@pytest.mark.parametrize("compiled", [False, True])
def test_outputs_that_a_later_hook_changes_first_are_not_checked(tmp_path: Path, *, compiled: bool) -> None:
    model: Any = built(Layers).inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    with traindiff.record(tmp_path / "run", model, optimizer, observe=OBSERVED, strict=True):
        for step in range(4):
            if step == 2:
                model[0].register_forward_hook(lambda *about: 2.0 * about[2], prepend=True)
            call(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient,product-wrong")
    assert (verdict.verdict, [*verdict.warnings]) == ("healthy", [])
