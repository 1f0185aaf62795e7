"""Gradients that do not follow from inputs and outputs of their layers are found, with the cause."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import traindiff
from tests.analyse.rules.small_trainings import points
from tests.on_ranks import run_on_ranks
from traindiff.analyse.findings import Finding
from traindiff.analyse.merge.run_steps import run_steps
from traindiff.analyse.rules import run_facts
from traindiff.analyse.rules.witness import GradientsFollow
from traindiff.storage import open_recording

Change = Callable[[Any, int], None]
SHORT = ("float32", "bfloat16", "autocast")
TARGET = "2.weight"


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def train(
    path: Path, *, change: Change = lambda model, step: None, precision: str = "float32", micro_batches: int = 2,
    zero: Callable[[int], bool] = lambda step: True, after: Change = lambda model, micro_step: None, clip: float = 0.0,
    steps: int = 5, copies: bool = False,
) -> Path:  # fmt: skip
    """Train with micro-batches; `change` changes gradients before the optimizer reads them, in each step.

    Where gradients are not cleared, `copies` puts copies in their place: then only numbers tell where they are from.
    """
    trained = model()
    if precision == "bfloat16":
        trained.bfloat16()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    with traindiff.record(path, trained, optimizer, observe=("loss", "witness"), strict=True):
        for step in range(steps):
            if zero(step):
                optimizer.zero_grad()
            elif copies:
                for one in trained.parameters():
                    one.grad = None if one.grad is None else one.grad.clone()
            for number in range(micro_batches):
                inputs, labels = points(step * micro_batches + number)
                with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
                    output = trained(inputs.bfloat16() if precision == "bfloat16" else inputs)
                (nn.functional.cross_entropy(output.float(), labels) / micro_batches).backward()
                after(trained, step * micro_batches + number)
            change(trained, step)
            if clip:
                nn.utils.clip_grad_norm_(trained.parameters(), clip)
            optimizer.step()
    return path


def found(path: Path) -> tuple[Finding, ...]:
    return traindiff.check(str(path), rules="wrong-gradient").findings


def gradient(trained: Any) -> Tensor:
    grad: Tensor = trained[2].weight.grad
    return grad


class Kept:
    """Keeps gradients of one moment for another one."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def stale(self, trained: Any, step: int) -> None:
        before, self.kept = self.kept, gradient(trained).clone()
        if step == 2 and before is not None:
            gradient(trained).copy_(before)

    def lost(self, trained: Any, micro_step: int) -> None:
        """Takes what micro-step 1 of step 2 contributes out again."""
        if micro_step == 4:
            self.kept = gradient(trained).clone()
        elif micro_step == 5 and self.kept is not None:
            gradient(trained).copy_(self.kept)

    def twice(self, trained: Any, micro_step: int) -> None:
        if micro_step == 4:
            self.kept = gradient(trained).clone()
        elif micro_step == 5 and self.kept is not None:
            gradient(trained).add_(gradient(trained) - self.kept)


def at_two(change: Callable[[Tensor], Any]) -> Change:
    def changing(trained: Any, step: int) -> None:
        if step == 2:
            change(gradient(trained))

    return changing


def one_row(grad: Tensor) -> None:
    row = int(grad.norm(dim=1).argmax())
    grad[row].zero_()


def one_element(grad: Tensor) -> None:
    flat = grad.view(-1)
    flat[int(flat.abs().argmax())] *= -1.0


FAULTS: dict[str, tuple[Change, str, str]] = {
    "zero": (at_two(Tensor.zero_), "zero", "is zero"),
    "doubled": (at_two(lambda grad: grad.mul_(2.0)), "factor", "2 x"),
    "sign": (at_two(Tensor.neg_), "factor", "-1 x"),
    "one row zero": (at_two(one_row), "unknown", "relative error"),
    "one element": (at_two(one_element), "unknown", "relative error"),
    "transposed": (at_two(lambda grad: grad.copy_(grad.t().clone())), "unknown", "relative error"),
}


@pytest.mark.parametrize("precision", SHORT)
@pytest.mark.parametrize("clip", [0.0, 0.01])
def test_right_gradients_are_no_findings(tmp_path: Path, precision: str, clip: float) -> None:
    verdict = traindiff.check(str(train(tmp_path / "run", precision=precision, clip=clip)), rules="wrong-gradient")

    assert verdict.verdict == "healthy", str(verdict)
    assert "Witnessed are the gradients of 100.0% of 676 parameters." in verdict.notes


@pytest.mark.parametrize("precision", SHORT)
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_gradient_is_found_in_its_step_at_its_parameter(tmp_path: Path, precision: str, name: str) -> None:
    change, cause, words = FAULTS[name]
    (finding,) = found(train(tmp_path / "run", change=change, precision=precision))

    assert (finding.step, finding.path, finding.kind) == (2, TARGET, "wrong-gradient")
    assert finding.evidence["cause"] == cause
    assert words in finding.message


def test_one_percent_is_found_in_float32(tmp_path: Path) -> None:
    (finding,) = found(train(tmp_path / "run", change=at_two(lambda grad: grad.mul_(1.01))))

    assert finding.message == "The gradient is 1.01 x what the inputs and outputs of its layer give."
    assert finding.difference == pytest.approx(0.01, rel=0.7)
    assert finding.floor < 1e-5


@pytest.mark.parametrize("precision", SHORT)
def test_a_stale_gradient_is_the_one_of_the_step_before(tmp_path: Path, precision: str) -> None:
    (finding,) = found(train(tmp_path / "run", change=Kept().stale, precision=precision))

    assert (finding.step, finding.path, finding.evidence["cause"]) == (2, TARGET, "stale")


@pytest.mark.parametrize("precision", SHORT)
@pytest.mark.parametrize("what", ["lost", "twice"])
def test_a_micro_step_is_named(tmp_path: Path, precision: str, what: str) -> None:
    (finding,) = found(train(tmp_path / "run", after=getattr(Kept(), what), precision=precision))

    assert (finding.step, finding.path, finding.micro_step) == (2, TARGET, 1)
    assert finding.evidence["cause"] == what
    assert "micro-step 1 of 2" in finding.message


@pytest.mark.parametrize("precision", SHORT)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_zero_grad_that_is_left_out_is_named_for_all_parameters(tmp_path: Path, precision: str, clip: float) -> None:
    path = train(tmp_path / "run", zero=lambda step: step != 3, precision=precision, clip=clip, copies=True)
    findings = found(path)

    assert {finding.path for finding in findings} == {name for name, _ in model().named_parameters()}
    assert {finding.step for finding in findings} == {3}
    assert all("was zero_grad() left out?" in finding.message for finding in findings)


def test_where_writes_tell_that_gradients_are_carried_the_witness_is_not_asked(tmp_path: Path) -> None:
    (finding,) = traindiff.check(str(train(tmp_path / "run", zero=lambda step: step != 3))).findings

    assert (finding.kind, finding.step) == ("carried-gradient", 3)
    assert finding.evidence["paths"] == [name for name, _ in model().named_parameters()]


def test_a_factor_of_all_gradients_by_the_training_is_a_note(tmp_path: Path) -> None:
    def change(trained: Any, step: int) -> None:  # noqa: ARG001
        norm = torch.stack([one.grad.norm() for one in trained.parameters()]).norm()
        for one in trained.parameters():
            one.grad.mul_(0.01 / norm)

    verdict = traindiff.check(str(train(tmp_path / "run", change=change)), rules="wrong-gradient")

    assert verdict.verdict == "healthy"
    assert "The training multiplies all gradients by one factor" in str(verdict)


def test_noise_on_all_gradients_is_a_note(tmp_path: Path) -> None:
    def change(trained: Any, step: int) -> None:
        generator = torch.Generator().manual_seed(step)
        for one in trained.parameters():
            one.grad += 0.1 * torch.randn(one.shape, generator=generator)

    verdict = traindiff.check(str(train(tmp_path / "run", change=change)), rules="wrong-gradient")

    assert verdict.verdict == "healthy"
    assert "The training changes gradients after the backward pass" in str(verdict)


def _masked(trained: Any, _: int) -> None:
    trained[2].weight.grad[:, :4] = 0.0


def _clipped_one_by_one(trained: Any, step: int) -> None:
    for one in trained.parameters() if step > 1 else ():
        if (norm := float(one.grad.norm())) > 0.05:
            one.grad.mul_(0.05 / norm)


def _masked_uncounted(trained: Any, _: int) -> None:
    trained[2].weight.grad.data[0, 0] = 0.0


@pytest.mark.parametrize("change", [_masked, _masked_uncounted, _clipped_one_by_one])
def test_some_gradients_that_the_training_always_writes_to_or_makes_smaller_are_warnings(
    tmp_path: Path, change: Change
) -> None:
    verdict = traindiff.check(str(train(tmp_path / "run", change=change)), rules="wrong-gradient")

    assert verdict.verdict == "healthy", str(verdict)
    assert verdict.warnings
    assert all(
        one.message.endswith("wrote to it after the backward pass: a mask, clipping, or a term that it added?")
        for one in verdict.warnings
    )
    assert [rule.result for rule in verdict.rules if rule.name == "wrong-gradient"] == ["warned"]


def test_a_factor_of_a_gradient_that_was_zero_at_first_is_a_warning(tmp_path: Path) -> None:
    """Both matrices of LoRA: the second is zero in the first step, so the gradient of the first is zero, too."""
    trained = model()
    trained[4].weight.data.zero_()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    with traindiff.record(tmp_path / "run", trained, optimizer, observe=("loss", "witness"), strict=True):
        for step in range(5):
            optimizer.zero_grad()
            inputs, labels = points(step)
            nn.functional.cross_entropy(trained(inputs), labels).backward()
            trained[2].weight.grad.mul_(1.5)
            optimizer.step()

    verdict = traindiff.check(str(tmp_path / "run"), rules="wrong-gradient")

    assert verdict.verdict == "healthy", str(verdict)
    (warning,) = verdict.warnings
    assert (warning.step, warning.path) == (1, TARGET)


def _clamped_uncounted(trained: Any, _: int) -> None:
    for one in trained.parameters():
        one.grad.data.clamp_(-1e-3, 1e-3)


def _clamped(trained: Any, _: int) -> None:
    for one in trained.parameters():
        one.grad.clamp_(-1e-3, 1e-3)


@pytest.mark.parametrize("change", [_clamped, _clamped_uncounted])
def test_clamped_gradients_are_a_note(tmp_path: Path, change: Change) -> None:
    verdict = traindiff.check(str(train(tmp_path / "run", change=change)), rules="wrong-gradient")

    assert (verdict.verdict, verdict.warnings) == ("healthy", ()), str(verdict)
    assert any(
        note.startswith("The training changes gradients after the backward pass (5 steps") for note in verdict.notes
    )


def test_a_clamped_gradient_whose_probes_are_zero_is_not_called_zero(tmp_path: Path) -> None:
    torch.manual_seed(0)
    trained = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    with traindiff.record(tmp_path / "run", trained, optimizer, observe=("loss", "witness"), strict=True):
        for _ in range(5):
            for _ in range(2):
                trained(torch.randn(4, 6)).square().mean().backward()
            _clamped(trained, 0)
            optimizer.step()
            optimizer.zero_grad()

    verdict = traindiff.check(str(tmp_path / "run"), rules="wrong-gradient")
    assert (verdict.verdict, verdict.warnings) == ("healthy", ()), str(verdict)


def test_micro_steps_that_count_unequally_since_the_training_writes_to_gradients_are_a_warning(tmp_path: Path) -> None:
    def halve(trained: Any, micro_step: int) -> None:
        for one in trained.parameters() if micro_step % 2 == 0 else ():
            one.grad.mul_(0.5)

    verdict = traindiff.check(str(train(tmp_path / "run", after=halve)), rules="wrong-gradient")

    assert verdict.verdict == "healthy", str(verdict)
    (warning,) = verdict.warnings
    assert warning.message.startswith("All gradients hold unequal parts of what micro-steps contributed: 0.5, 1. The ")
    assert any(
        note.startswith("The training changes gradients after the backward pass (5 steps") for note in verdict.notes
    )
    assert "Witnessed are the gradients of 0.0% of 676 parameters." in verdict.notes


def test_one_gradient_that_the_training_writes_to_between_micro_steps_is_found(tmp_path: Path) -> None:
    def halve(trained: Any, micro_step: int) -> None:
        if micro_step == 4:
            trained[2].weight.grad.mul_(0.5)

    (finding,) = found(train(tmp_path / "run", after=halve))

    assert (finding.step, finding.path) == (2, TARGET)
    assert finding.message == "The gradient holds 0.5 x what micro-step 0 of 2 contributed."


def test_gradients_that_are_clipped_after_each_micro_step_are_said_not_to_be_witnessed(tmp_path: Path) -> None:
    def after(trained: Any, _: int) -> None:
        nn.utils.clip_grad_norm_(trained.parameters(), 1e-3)

    verdict = traindiff.check(str(train(tmp_path / "run", after=after)), rules="wrong-gradient")

    assert (verdict.verdict, verdict.warnings) == ("healthy", ()), str(verdict)
    assert "Witnessed are the gradients of 0.0% of 676 parameters." in verdict.notes
    assert any("clipped or read its gradient before the last backward pass" in note for note in verdict.notes)


def test_one_gradient_that_is_doubled_stands_out_from_a_common_division(tmp_path: Path) -> None:
    def change(trained: Any, step: int) -> None:
        for one in trained.parameters():
            one.grad.div_(16.0)
        if step == 3:
            trained[2].weight.grad.mul_(2.0)

    (finding,) = found(train(tmp_path / "run", change=change))

    assert (finding.step, finding.path) == (3, TARGET)
    assert finding.message.startswith("The gradient is 2 x what the inputs and outputs of its layer give, beside the ")
    assert finding.message.endswith("factor 0.0625 that all others have.")


@pytest.mark.parametrize("factor", [-1.0, 2.0])
def test_one_gradient_that_is_wrong_later_stands_out_from_clipping_by_hand(tmp_path: Path, factor: float) -> None:
    """The common factor is another one in each step."""

    def change(trained: Any, step: int) -> None:
        norm = nn.utils.get_total_norm([one.grad for one in trained.parameters()])
        for one in trained.parameters():
            one.grad.mul_(0.01 / norm)
        if step >= 2:
            trained[2].weight.grad.mul_(factor)

    (finding,) = found(train(tmp_path / "run", change=change))

    assert (finding.step, finding.path) == (2, TARGET)
    assert finding.message.startswith(f"The gradient is {factor:.4g} x what the inputs and outputs of its layer give")


def test_parts_that_the_training_clips_one_by_one_are_no_finding_in_a_long_run(tmp_path: Path) -> None:
    def change(trained: Any, _: int) -> None:
        for part, largest in ((trained[:4], 0.02), (trained[4], 0.3)):
            norm = nn.utils.get_total_norm([one.grad for one in part.parameters()])
            for one in part.parameters():
                one.grad.mul_((largest / norm).clamp(max=1.0))

    verdict = traindiff.check(str(train(tmp_path / "run", change=change, steps=40)), rules="wrong-gradient")

    assert verdict.verdict == "healthy", str(verdict)


def _late_term(trained: Any, step: int) -> None:
    for one in (trained[0].weight, trained[2].weight):
        one.grad.add_(one.detach(), alpha=0.1 * (step > 0))


def _projected_once(trained: Any, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for one in (trained[0].weight, trained[2].weight) if step == 2 else ():
        one.grad = one.grad + 0.1 * torch.randn(one.shape, generator=generator)


@pytest.mark.parametrize(("change", "first"), [(_late_term, 1), (_projected_once, 2)])
def test_terms_that_the_training_adds_to_several_gradients_are_a_warning_for_each(
    tmp_path: Path, change: Change, first: int
) -> None:
    verdict = traindiff.check(str(train(tmp_path / "run", change=change)), rules="wrong-gradient")

    assert verdict.verdict == "healthy", str(verdict)
    assert [(one.path, one.step) for one in verdict.warnings] == [("0.weight", first), (TARGET, first)]
    assert all("a term that it added?" in one.message for one in verdict.warnings)


def test_what_a_factor_explains_is_not_less_where_the_rule_is_stricter(tmp_path: Path) -> None:
    def change(trained: Any, step: int) -> None:
        for layer in (trained[0], trained[2]) if step > 1 else ():
            grad = layer.weight.grad
            grad.mul_(2.0).add_(torch.randn_like(grad) * grad.square().mean().sqrt() * 2.0 ** (step / 2 - 24))

    recording = open_recording(str(train(tmp_path / "run", change=change, micro_batches=1, steps=14)))
    rules = [GradientsFollow(run_facts(recording), strictness=strictness) for strictness in (1.0, 2.0)]
    found: tuple[set[tuple[str, int]], ...] = (set(), set())
    for one in run_steps(recording):
        for rule, own in zip(rules, found, strict=True):
            own.update((finding.path, finding.step) for finding in rule.step(one.table, step=one.step))

    assert {step for _, step in found[0]} == set(range(2, 14))
    assert found[0] <= found[1]


def test_one_gradient_that_is_written_uncounted_is_found(tmp_path: Path) -> None:
    (finding,) = found(train(tmp_path / "run", change=at_two(lambda grad: grad.data.mul_(2.0))))

    assert (finding.step, finding.path) == (2, TARGET)


class Scaling(nn.Module):
    """Changes the gradient of what a layer returned, by a hook on the tensor or on its node."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 4)
        self.table = nn.Embedding(8, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        hidden.register_hook(lambda gradient: 5.0 * gradient)
        looked_up = self.table(torch.arange(len(inputs)) % 8)
        looked_up.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        out: Tensor = self.last(torch.tanh(hidden) + looked_up)
        return out


def test_hooks_on_activations_change_what_their_layers_are_given(tmp_path: Path) -> None:
    trained = Scaling()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    with traindiff.record(tmp_path / "run", trained, optimizer, observe=("loss", "witness"), strict=True):
        for step in range(3):
            inputs, labels = points(step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(trained(inputs), labels).backward()
            optimizer.step()

    verdict = traindiff.check(str(tmp_path / "run"), rules="wrong-gradient")
    assert verdict.verdict == "healthy", str(verdict)
    assert any(note.startswith("Witnessed are the gradients of 100.0%") for note in verdict.notes)


def by_hand(path: str, divides: bool) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with traindiff.record(path, trained, optimizer, observe=("loss", "witness"), strict=True):
        for step in range(3):
            inputs, labels = points(100 * rank + step)
            optimizer.zero_grad()
            (nn.functional.cross_entropy(trained(inputs), labels) / (1 if divides else size)).backward()
            for one in trained.parameters():
                torch.distributed.all_reduce(one.grad)
                if divides:
                    one.grad.div_(size)  # type: ignore[union-attr]
            optimizer.step()


@pytest.mark.parametrize("divides", [True, False])
def test_ranks_may_add_up_gradients_by_hand(tmp_path: Path, *, divides: bool) -> None:
    run_on_ranks(by_hand, 2, str(tmp_path / "run"), divides)

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient")
    assert verdict.verdict == "healthy", str(verdict)
    said = "All gradients are the sum over ranks of what each contributed, not the mean (3 steps, first 0)."
    assert (said in verdict.notes) == (not divides)


def test_a_scaler_that_leaves_out_all_steps_leaves_nothing_to_witness(tmp_path: Path) -> None:
    trained = model()
    optimizer, scaler = torch.optim.SGD(trained.parameters(), lr=0.05), torch.amp.GradScaler("cpu", init_scale=2.0**40)
    with traindiff.record(tmp_path / "run", trained, optimizer, observe=("loss", "grad", "witness"), strict=True):
        for number in range(4):
            inputs, labels = points(number)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = nn.functional.cross_entropy(trained(inputs), labels)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    verdict = traindiff.check(tmp_path / "run", rules="wrong-gradient")

    assert "Witnessed are the gradients of none of 676 parameters: in no step were they finite." in verdict.notes


def test_how_much_was_witnessed_is_told_with_the_reasons(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = model(), nn.Parameter(torch.ones(4))
            self.slope, self.hooked = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
            self.hooked.register_post_accumulate_grad_hook(_halved)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.inner(x) * self.slope.exp() + self.hooked

    trained = Scaled()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    with traindiff.record(tmp_path / "run", trained, optimizer, observe="witness", strict=True):
        trained(points(0)[0]).square().mean().backward()
        optimizer.step()

    verdict = traindiff.check(str(tmp_path / "run"))
    assert verdict.verdict == "healthy"
    assert "Witnessed are the gradients of 98.8% of 688 parameters." in verdict.notes
    (unknown,) = [note for note in verdict.notes if note.startswith("Of 0.6%, the witness knows what backward passes ")]
    assert unknown.endswith("(functions in compiled code, hooks, penalties, parametrizations, some functions): slope.")
    assert (
        "Not witnessed: hooked, because it has a hook, which may change its gradient after it is added."
        in verdict.notes
    )


def _halved(parameter: Any) -> None:
    parameter.grad.mul_(0.5)


def test_without_witnesses_nothing_is_said(tmp_path: Path) -> None:
    trained = model()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
    with traindiff.record(tmp_path / "run", trained, optimizer, observe="grad", strict=True):
        trained(points(0)[0]).square().mean().backward()
        gradient(trained).mul_(2.0)
        optimizer.step()

    assert not any("itnessed" in note for note in traindiff.check(str(tmp_path / "run")).notes)


def test_compare_explains_a_difference_by_it(tmp_path: Path) -> None:
    baseline = train(tmp_path / "baseline")
    candidate = train(tmp_path / "candidate", after=Kept().lost)

    result = traindiff.compare(str(baseline), str(candidate))
    assert result.verdict == "diverged"
    assert "In the candidate, the gradient lacks what micro-step 1 (the second of 2) contributed." in str(result)
    assert traindiff.compare(str(baseline), str(train(tmp_path / "again"))).verdict == "identical"


def on_ranks(path: str, forgets: bool) -> None:
    """Train on two ranks with FSDP2, in micro-batches."""
    torch.manual_seed(0)
    trained = model()
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    for layer in trained:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.01)
    with traindiff.record(path, trained, optimizer, observe=("loss", "witness"), strict=True):
        for step in range(5):
            if not forgets:
                optimizer.zero_grad()
            for micro_step in range(2):
                inputs, labels = points(100 * torch.distributed.get_rank() + 2 * step + micro_step)
                (nn.functional.cross_entropy(trained(inputs), labels) / 2).backward()
            optimizer.step()


@pytest.mark.parametrize("forgets", [False, True])
def test_a_missing_zero_grad_is_found_in_sharded_trainings_too(tmp_path: Path, *, forgets: bool) -> None:
    run_on_ranks(on_ranks, 2, str(tmp_path / "run"), forgets)

    findings = traindiff.check(tmp_path / "run").findings
    assert [(one.kind, one.step) for one in findings] == ([("carried-gradient", 1)] if forgets else [])
