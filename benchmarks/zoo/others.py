"""Trainings that are neither of language nor of images, and steps that are not plain."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.zoo.recipe import Batch, Now, Recipe
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer

SAMPLES = 8


class GraphLayer(nn.Module):
    """Each node adds what its neighbors send, in a mean, to what it is."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.own, self.sent = nn.Linear(before, after), nn.Linear(before, after, bias=False)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        sent = self.sent(nodes)[edges[:, 0]]
        total = torch.zeros(len(nodes), sent.shape[1], dtype=sent.dtype).index_add(0, edges[:, 1], sent)
        number = torch.zeros(len(nodes), 1, dtype=sent.dtype).index_add(
            0, edges[:, 1], torch.ones(len(edges), 1, dtype=sent.dtype)
        )
        return self.own(nodes) + total / number.clamp(min=1)


class Gnn(nn.Module):
    """Two layers over the nodes of one graph, with BatchNorm over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = GraphLayer(12, 24), nn.BatchNorm1d(24)
        self.conv2 = GraphLayer(24, 24)
        self.norm2 = nn.LayerNorm(24)
        self.act = nn.ReLU()
        self.head = nn.Linear(24, 5)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = self.act(self.norm1(self.conv1(nodes, edges)))
        return self.head(self.act(self.norm2(self.conv2(x, edges))))


def sample_graph(data: torch.Generator) -> Batch:
    """40 nodes, 120 edges, and a class for each node."""
    return {
        "nodes": torch.randn(40, 12, generator=data),
        "edges": torch.randint(40, (120, 2), generator=data),
        "labels": torch.randint(5, (40,), generator=data),
    }


def graph_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy over nodes."""
    return functional.cross_entropy(model(batch["nodes"], batch["edges"]).float(), batch["labels"])


class Dlrm(nn.Module):
    """Numbers and categories: embedding bags, products of all pairs, and an MLP."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(50, width, mode="sum") for _ in range(3))
        self.top = nn.Sequential(nn.Linear(width + 6, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        every = torch.stack([dense, *(bag(categories[:, number]) for number, bag in enumerate(self.bags))], 1)
        products = every @ every.transpose(1, 2)
        row, column = torch.triu_indices(4, 4, 1)
        return self.top(torch.cat([dense, products[:, row, column]], 1)).squeeze(1)


def sample_clicks(data: torch.Generator) -> Batch:
    """Numbers, three bags of four categories each, and clicks."""
    return {
        "numbers": torch.randn(4 * SAMPLES, 6, generator=data),
        "categories": torch.randint(50, (4 * SAMPLES, 3, 4), generator=data),
        "clicks": torch.rand(4 * SAMPLES, generator=data).round(),
    }


def click_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross-entropy."""
    found = model(batch["numbers"], batch["categories"]).float()
    return functional.binary_cross_entropy_with_logits(found, batch["clicks"].float())


class ActorCritic(nn.Module):
    """One torso, a policy and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.torso(states)
        return self.policy(x), self.value(x).squeeze(-1)


def sample_episodes(data: torch.Generator) -> Batch:
    """States, what was done in them, and what came of it."""
    return {
        "states": torch.randn(4 * SAMPLES, 8, generator=data),
        "actions": torch.randint(4, (4 * SAMPLES,), generator=data),
        "returns": torch.randn(4 * SAMPLES, generator=data),
    }


def actor_critic_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Policy gradient with the value as baseline, squared error of the value, and an entropy bonus."""
    logits, values = (one.float() for one in model(batch["states"]))
    logs = logits.log_softmax(-1)
    returns = batch["returns"].float()
    advantage = returns - values.detach()
    taken = logs.gather(-1, batch["actions"][:, None]).squeeze(-1)
    entropy = -(logs.exp() * logs).sum(-1)
    return (-advantage * taken + 0.5 * (values - returns).square() - 0.01 * entropy).mean()


def sample_points(data: torch.Generator) -> Batch:
    """Points and their targets."""
    points = torch.randn(4 * SAMPLES, 6, generator=data)
    return {"points": points, "targets": points.sin().sum(1, keepdim=True)}


def regression_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error."""
    return functional.mse_loss(model(batch["points"]).float(), batch["targets"].float())


def mlp() -> nn.Module:
    """Two hidden layers with LayerNorm."""
    return nn.Sequential(
        nn.Linear(6, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 24), nn.Softplus(), nn.Linear(24, 1)
    )


def lbfgs_step(now: Now) -> None:
    """A step of LBFGS, which evaluates the loss several times."""

    def closure() -> float:
        now.recipe.zero_grad(now)
        loss = now.loss(now.batch)
        loss.backward()
        now.recipe.after_backward(now)
        return float(loss.detach())

    now.optimizers[0].step(closure)
    now.recipe.after_step(now)


def sam_step(now: Now) -> None:
    """Gradients at the point to which the first gradients climb are used where the parameters were."""
    now.backward()
    parameters = [one for one in now.model.parameters() if one.grad is not None]
    with torch.no_grad():
        norm = torch.stack([one.grad.norm() for one in parameters]).norm()
        moves = [0.05 * one.grad / (norm + 1e-12) for one in parameters]
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.add_(move)
    now.recipe.zero_grad(now)
    now.backward()
    with torch.no_grad():
        for parameter, move in zip(parameters, moves, strict=True):
            parameter.sub_(move)
    now.recipe.after_backward(now)
    now.clip()
    now.optimizers[0].step()
    now.recipe.after_step(now)
    now.recipe.zero_grad(now)


class Gan(nn.Module):
    """A generator and a discriminator, which the training calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 12), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(12, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))


def gan_optimizers(model: nn.Module) -> dict[str, Optimizer]:
    """Adam for each."""
    parts: Any = model
    return {
        "discriminator": torch.optim.Adam(parts.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        "generator": torch.optim.Adam(parts.generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
    }


def sample_gan(data: torch.Generator) -> Batch:
    """Real samples and noise."""
    return {
        "real": torch.randn(2 * SAMPLES, 12, generator=data).tanh(),
        "noise": torch.randn(2 * SAMPLES, 6, generator=data),
    }


def gan_step(now: Now) -> None:
    """The discriminator's step, then the generator's."""
    model: Any = now.model
    of_discriminator, of_generator = now.optimizers
    bce = functional.binary_cross_entropy_with_logits
    of_discriminator.zero_grad()
    with now.autocast():
        made = model.generator(now.batch["noise"])
        real, fake = model.discriminator(now.batch["real"]).float(), model.discriminator(made.detach()).float()
    (bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))).backward()
    now.recipe.after_backward(now)
    of_discriminator.step()
    of_generator.zero_grad()
    with now.autocast():
        fooled = model.discriminator(made).float()
    bce(fooled, torch.ones_like(fooled)).backward()
    of_generator.step()
    now.recipe.after_step(now)


def penalty_loss(model: nn.Module, batch: Batch) -> Tensor:
    """A critic's loss with a penalty on the norm of its gradient between real and made samples."""
    real, made = batch["real"], batch["made"]
    share = batch["share"]
    between = (share * real + (1 - share) * made).requires_grad_()
    (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = (gradient.float().flatten(1).norm(dim=1) - 1).square().mean()
    return (model(made).float() - model(real).float()).mean() + 10 * penalty


def sample_critic(data: torch.Generator) -> Batch:
    """Real and made samples, and where between them the gradient is taken."""
    return {
        "real": torch.randn(2 * SAMPLES, 12, generator=data),
        "made": torch.randn(2 * SAMPLES, 12, generator=data) * 0.5,
        "share": torch.rand(2 * SAMPLES, 1, generator=data),
    }


class Temporal(nn.Module):
    """Dilated convolutions with weight normalization: [batch, 4, length] -> [batch, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = weight_norm(nn.Conv1d(4, 12, 3, padding=2, dilation=1))
        self.conv2 = weight_norm(nn.Conv1d(12, 12, 3, padding=4, dilation=2))
        self.act = nn.ELU()
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(12, 3)

    def forward(self, series: Tensor) -> Tensor:
        x = self.act(self.conv1(series)[..., : series.shape[-1]])
        x = self.dropout(self.act(self.conv2(x)[..., : series.shape[-1]]))
        return self.head(x[..., -1])


def sample_series(data: torch.Generator) -> Batch:
    """Series and their classes."""
    return {
        "series": torch.randn(2 * SAMPLES, 4, 20, generator=data),
        "labels": torch.randint(3, (2 * SAMPLES,), generator=data),
    }


def series_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy."""
    return functional.cross_entropy(model(batch["series"]).float(), batch["labels"])


OTHERS = (
    Recipe(
        name="gnn", build=Gnn, sample=sample_graph, loss=graph_loss, cuttable=False,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4),
    ),
    Recipe(
        name="dlrm", build=Dlrm, sample=sample_clicks, loss=click_loss,
        optimizer=lambda model: torch.optim.Adagrad(model.parameters(), lr=0.02),
    ),
    Recipe(
        name="actor-critic", build=ActorCritic, sample=sample_episodes, loss=actor_critic_loss, clip=0.5,
        optimizer=lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    ),
    Recipe(
        name="lbfgs", build=mlp, sample=sample_points, loss=regression_loss, step=lbfgs_step, cuttable=False, steps=3,
        optimizer=lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    ),
    Recipe(
        name="sam", build=mlp, sample=sample_points, loss=regression_loss, step=sam_step, cuttable=False,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    ),
    Recipe(
        name="gan", build=Gan, sample=sample_gan, loss=regression_loss, step=gan_step, optimizer=gan_optimizers,
        cuttable=False,
    ),
    Recipe(
        name="gradient-penalty", sample=sample_critic, loss=penalty_loss,
        build=lambda: nn.Sequential(nn.Linear(12, 24), nn.SiLU(), nn.Linear(24, 24), nn.SiLU(), nn.Linear(24, 1)),
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.0, 0.9)),
    ),
    Recipe(
        name="temporal", build=Temporal, sample=sample_series, loss=series_loss, cuttable=False,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
    ),
)  # fmt: skip
