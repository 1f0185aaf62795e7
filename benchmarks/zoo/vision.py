"""Models of images, from their public descriptions."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.zoo.recipe import Batch, Now, Recipe
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

SAMPLES = 8
CLASSES = 10


def sample_images(data: torch.Generator) -> Batch:
    """Images and their classes."""
    return {
        "images": torch.randn(SAMPLES, 3, 16, 16, generator=data),
        "labels": torch.randint(CLASSES, (SAMPLES,), generator=data),
    }


def classification_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy."""
    return functional.cross_entropy(model(batch["images"]).float(), batch["labels"])


def smoothed_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy with smoothed labels."""
    return functional.cross_entropy(model(batch["images"]).float(), batch["labels"], label_smoothing=0.1)


def sgd(model: nn.Module) -> Optimizer:
    """SGD with Nesterov momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)


def adam(model: nn.Module) -> Optimizer:
    """Adam."""
    return torch.optim.Adam(model.parameters(), lr=2e-3)


class Bottleneck(nn.Module):
    """Three convolutions with BatchNorm, beside a shortcut."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 2 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(2 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(before, 2 * width, 1, stride=stride, bias=False))
        self.shortcut.append(nn.BatchNorm2d(2 * width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three bottlenecks, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.layers = nn.Sequential(Bottleneck(8, 8, 1), Bottleneck(16, 8, 2), Bottleneck(16, 12, 2))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(24, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.relu(self.bn(self.stem(x))))
        return self.fc(self.pool(x).flatten(1))


class DoubleConv(nn.Module):
    """Two convolutions, one with BatchNorm and one with GroupNorm."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, after)
        self.act = nn.LeakyReLU(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm2(self.conv2(self.act(self.norm1(self.conv1(x))))))


class UNet(nn.Module):
    """Two levels down, and up again beside what was there: [batch, 3, 16, 16] -> [batch, 4, 16, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = DoubleConv(3, 8), DoubleConv(8, 16)
        self.pool = nn.MaxPool2d(2)
        self.middle = DoubleConv(16, 16)
        self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.conv2 = DoubleConv(32, 8)
        self.up1 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.conv1 = DoubleConv(16, 8)
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        y = self.conv2(torch.cat([self.up2(self.middle(self.pool(second))), second], 1))
        return self.out(self.conv1(torch.cat([self.up1(y), first], 1)))


def sample_segments(data: torch.Generator) -> Batch:
    """Images, and a class for each pixel."""
    return {
        "images": torch.randn(SAMPLES, 3, 16, 16, generator=data),
        "labels": torch.randint(4, (SAMPLES, 16, 16), generator=data),
    }


class DropPath(nn.Module):
    """Stochastic depth: drops the branch of a sample with a chance."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.chance:
            return x
        kept = torch.rand(len(x), 1, 1, device=x.device) >= self.chance
        return x * kept.to(x.dtype) / (1 - self.chance)


class VitBlock(nn.Module):
    """Attention and an MLP; each branch may be dropped."""

    def __init__(self, width: int, chance: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.path = DropPath(chance)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.path(self.attn(y, y, y, need_weights=False)[0])
        return x + self.path(self.mlp(self.norm2(x)))


class Vit(nn.Module):
    """Patches, a class token, learned positions and two blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.blocks = nn.ModuleList(VitBlock(width, 0.1 * number) for number in range(2))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class TimedBlock(nn.Module):
    """Two convolutions with GroupNorm, shifted by an embedding of the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(width, width)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(self.act(self.norm1(x))) + self.time(time)[:, :, None, None]
        return x + self.conv2(self.act(self.norm2(y)))


class Denoiser(nn.Module):
    """Predicts the noise in an image at a time."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.inlet = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(TimedBlock(width) for _ in range(2))
        self.norm = nn.GroupNorm(4, width)
        self.outlet = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, noisy: Tensor, time: Tensor) -> Tensor:
        frequencies = torch.exp(-torch.arange(self.width // 2) * 9.2 / (self.width // 2))
        angles = time[:, None] * frequencies
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1).to(noisy.dtype))
        x = self.inlet(noisy)
        for block in self.blocks:
            x = block(x, embedded)
        return self.outlet(functional.silu(self.norm(x)))


def sample_noisy(data: torch.Generator) -> Batch:
    """Images, noise, and times from 0 to 99."""
    return {
        "images": torch.randn(SAMPLES, 3, 12, 12, generator=data),
        "noise": torch.randn(SAMPLES, 3, 12, 12, generator=data),
        "time": torch.randint(100, (SAMPLES,), generator=data),
    }


def denoising_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error of the predicted noise."""
    kept = torch.cos(batch["time"] / 100 * 1.5)[:, None, None, None].to(batch["images"].dtype)
    noisy = kept * batch["images"] + (1 - kept * kept).sqrt() * batch["noise"]
    return functional.mse_loss(model(noisy, batch["time"]).float(), batch["noise"].float())


class Vae(nn.Module):
    """Convolutions into a mean and a variance, and transposed ones out of a draw."""

    def __init__(self, size: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, stride=2, padding=1), nn.ReLU(), nn.Flatten())
        self.mean, self.log_variance = nn.Linear(512, size), nn.Linear(512, size)
        self.inlet = nn.Linear(size, 512)
        self.decoder = nn.Sequential(nn.ReLU(), nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1), nn.Sigmoid())

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        encoded = self.encoder(images)
        mean, log_variance = self.mean(encoded), self.log_variance(encoded)
        noise = torch.randn(mean.shape).to(mean)  # the same draws in every dtype
        drawn = mean + noise * (0.5 * log_variance).exp()
        return self.decoder(self.inlet(drawn).view(-1, 8, 8, 8)), mean, log_variance


def vae_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Squared error of what is decoded, and the divergence from a normal distribution."""
    images = batch["images"].sigmoid()
    decoded, mean, log_variance = (one.float() for one in model(images))
    apart = (decoded - images.float()).square().flatten(1).sum(1)
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)
    return (apart + divergence).mean()


class TwoTowers(nn.Module):
    """Images and texts in one space: gives the similarities of all pairs."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 8, 4, stride=4), nn.GELU(), nn.Flatten(), nn.Linear(128, width, bias=False)
        )
        self.embed = nn.EmbeddingBag(64, width, mode="mean")
        self.text = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width, bias=False))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        seen = functional.normalize(self.image(images), dim=-1)
        read = functional.normalize(self.text(self.embed(texts)), dim=-1)
        return self.scale.exp() * seen @ read.T


def sample_captions(data: torch.Generator) -> Batch:
    """Images and texts."""
    return {
        "images": torch.randn(SAMPLES, 3, 16, 16, generator=data),
        "texts": torch.randint(64, (SAMPLES, 6), generator=data),
    }


def contrastive_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Cross-entropy of the right pair, both ways."""
    logits = model(batch["images"], batch["texts"]).float()
    right = torch.arange(len(logits))
    return (functional.cross_entropy(logits, right) + functional.cross_entropy(logits.T, right)) / 2


class Averaged(nn.Module):
    """A ConvNet beside the moving average of its weights, which no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
            nn.Linear(128, CLASSES),
        )  # fmt: skip
        self.average = AveragedModel(self.online, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def forward(self, images: Tensor) -> Tensor:
        return self.online(images)


def averaged_step(now: Now) -> None:
    """A plain step, after which the average moves."""
    now.backward()
    now.recipe.after_backward(now)
    now.clip()
    now.optimizers[0].step()
    model: Any = now.model
    model.average.update_parameters(model.online)
    now.recipe.after_step(now)
    now.recipe.zero_grad(now)


class Distilled(nn.Module):
    """A student that learns what a frozen teacher says."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.teacher.requires_grad_(False)
        self.student = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
            nn.Dropout(0.0), nn.Linear(128, CLASSES),
        )  # fmt: skip

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            wanted = self.teacher(images)
        return self.student(images), wanted


def distillation_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Divergence from what the teacher says at a temperature of 2, and cross-entropy."""
    found, wanted = (one.float() for one in model(batch["images"]))
    apart = functional.kl_div(
        functional.log_softmax(found / 2, -1), functional.softmax(wanted / 2, -1), reduction="batchmean"
    )
    return 4 * apart + functional.cross_entropy(found, batch["labels"])


VISION = (
    Recipe(
        name="resnet", build=ResNet, sample=sample_images, loss=classification_loss, optimizer=sgd, cuttable=False,
    ),
    Recipe(name="unet", build=UNet, sample=sample_segments, loss=classification_loss, optimizer=adam, cuttable=False),
    Recipe(
        name="vit", build=Vit, sample=sample_images, loss=smoothed_loss, optimizer=adam, cuttable=False, block=VitBlock,
        clip=1.0,
    ),
    Recipe(
        name="diffusion", build=Denoiser, sample=sample_noisy, loss=denoising_loss, optimizer=adam, block=TimedBlock,
        clip=1.0,
    ),
    Recipe(name="vae", build=Vae, sample=sample_images, loss=vae_loss, optimizer=adam, cuttable=False),
    Recipe(
        name="contrastive", build=TwoTowers, sample=sample_captions, loss=contrastive_loss, optimizer=adam,
        cuttable=False,
    ),
    Recipe(
        name="averaging", build=Averaged, sample=sample_images, loss=classification_loss, step=averaged_step,
        optimizer=lambda model: sgd(model.online), cuttable=False,
    ),
    Recipe(
        name="distillation", build=Distilled, sample=sample_images, loss=distillation_loss,
        optimizer=lambda model: adam(model.student),
    ),
)  # fmt: skip
