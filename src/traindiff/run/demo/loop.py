"""The training loop of the demo, with one method for each place where real training loops go wrong."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.optim import AdamW

from traindiff.run.demo.model import Batch, LanguageModel, ModelSize, build_model, make_batch, read_text


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """The settings of the demo training.

    Attributes:
        size: Shape of the model.
        batch_size: Samples in the global batch.
        learning_rate: Learning rate at the end of the warm-up.
        warmup_steps: Steps over which the learning rate grows linearly.
        weight_decay: Weight decay of matrices; biases and LayerNorms have none.
        betas: AdamW's betas.
        largest_norm: Gradients with a larger norm are scaled down to it. A healthy training never reaches the default,
            because clipping would hide by which factor a gradient was wrong, and in which layer.
    """

    size: ModelSize = field(default_factory=ModelSize)
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    largest_norm: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """The numbers that a training reports of a step: its mean loss, and the gradient norm before clipping."""

    step: int
    loss: float
    gradient_norm: float


class TrainingLoop:
    """A model, its optimizer and its data, with one method for each thing a loop has to get right.

    Args:
        settings: The settings.
        micro_batches: Equal parts in which each batch is computed; divides the batch size.
        seed: Seed of weights, dropout masks and order of the text.
    """

    def __init__(self, settings: DemoSettings, *, micro_batches: int, seed: int) -> None:
        self.settings = settings
        self.micro_batches = micro_batches
        self.seed = seed
        self.text = read_text()
        self.model = build_model(LanguageModel, settings.size, seed=seed)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = AdamW(groups, lr=settings.learning_rate, betas=settings.betas)

    def run_step(self, step: int) -> StepNumbers:
        """Train on the batch of one step."""
        self.begin_step(step)
        self.zero_grad()
        loss = 0.0
        for micro_step, part in enumerate(self.batch(step).split(self.micro_batches)):
            micro_loss = self.model(part.inputs, part.targets, part.sample_ids, step=step)
            # Parts have equal sizes, so the sum of these is the mean over the whole batch.
            share = micro_loss / self.micro_batches
            self.backward(share, step=step, micro_step=micro_step)
            loss += share.item()
        gradient_norm = self.clip()
        self.optimizer.step()
        return StepNumbers(step=step, loss=loss, gradient_norm=gradient_norm)

    def begin_step(self, step: int) -> None:
        """Set the learning rate of the step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step: linear warm-up, then constant."""
        return self.settings.learning_rate * min(1.0, (step + 1) / self.settings.warmup_steps)

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.optimizer.zero_grad()

    def batch(self, step: int) -> Batch:
        """The global batch of the step."""
        settings = self.settings
        return make_batch(
            self.text, step, batch_size=settings.batch_size, context=settings.size.context, seed=self.seed
        )

    def backward(self, loss: Tensor, *, step: int, micro_step: int) -> None:  # noqa: ARG002  for faults
        """Add the gradients of one micro-batch's share of the loss."""
        loss.backward()

    def clip(self) -> float:
        """Limit the norm of all gradients together; return the norm before that."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.largest_norm)
        return float(norm)
