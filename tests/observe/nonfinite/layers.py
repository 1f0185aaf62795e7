"""A call of every layer of `torch.nn`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A module and what it is called with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


_ABSTRACT = {
    "CrossMapLRN2d",  # writes into out=, which is refused: see test_layers
    "Module",
    "Container",
    "Sequential",
    "ModuleList",
    "ModuleDict",
    "ParameterList",
    "ParameterDict",
    "DataParallel",
    "RNNBase",
    "RNNCellBase",
}
_NUMBER = 8


def layers() -> dict[str, Layer]:
    """A call of each class of `torch.nn` that computes something, by its name, and of what they leave out.

    Raises:
        KeyError: torch has a class of which none is here.
    """
    torch.manual_seed(0)
    made = _layers()
    found = {
        name: made[name]
        for name, one in vars(nn).items()
        if isinstance(one, type)
        and issubclass(one, nn.Module)
        and name not in _ABSTRACT
        and not name.startswith("Lazy")
    }
    return found | {name: one for name, one in made.items() if " " in name}


def _of(module: nn.Module, *args: Any, **kwargs: Any) -> Layer:
    return Layer(module=module, args=args, kwargs=kwargs)


def _layers() -> dict[str, Layer]:
    spaces = {1: torch.randn(2, 4, 12), 2: torch.randn(2, 4, 12, 12), 3: torch.randn(2, 4, 6, 6, 6)}
    return {
        **_of_spaces(spaces),
        **_activations(),
        **_losses(),
        **_sequences(),
        **_others(spaces),
        **_functions(spaces),
    }


def _of_spaces(spaces: dict[int, Tensor]) -> dict[str, Layer]:
    made: dict[str, Layer] = {}
    for axes, x in spaces.items():
        by_name: dict[str, tuple[Any, ...]] = {
            "Conv": (4, 6, 3),
            "ConvTranspose": (4, 6, 3, 2),
            "BatchNorm": (4,),
            "InstanceNorm": (4,),
            "AvgPool": (2,),
            "MaxPool": (2,),
            "LPPool": (2, 2),
            "AdaptiveAvgPool": (3,),
            "AdaptiveMaxPool": (3,),
            "ReflectionPad": (2,),
            "ReplicationPad": (2,),
            "ConstantPad": (2, 1.5),
            "ZeroPad": (2,),
            "CircularPad": (2,),
            "Dropout": (0.5,),
        }
        for name, arguments in by_name.items():
            if hasattr(nn, f"{name}{axes}d"):
                made[f"{name}{axes}d"] = _of(getattr(nn, f"{name}{axes}d")(*arguments), x)
        pooled, places = getattr(functional, f"max_pool{axes}d")(x, 2, return_indices=True)
        made[f"MaxUnpool{axes}d"] = _of(getattr(nn, f"MaxUnpool{axes}d")(2), pooled, places)
        made[f"convolution of groups {axes}d"] = _of(getattr(nn, f"Conv{axes}d")(4, 4, 3, 2, "valid", 1, 2), x)
        made[f"batch norm in evaluation {axes}d"] = _of(getattr(nn, f"BatchNorm{axes}d")(4).eval(), x)
        made[f"max pool with places {axes}d"] = _of(getattr(nn, f"MaxPool{axes}d")(2, return_indices=True), x)
    made["FractionalMaxPool2d"] = _of(nn.FractionalMaxPool2d(2, output_size=5), spaces[2])
    made["FractionalMaxPool3d"] = _of(nn.FractionalMaxPool3d(2, output_size=3), spaces[3])
    made["SyncBatchNorm"] = _of(nn.SyncBatchNorm(4).eval(), spaces[2])
    return made


def _activations() -> dict[str, Layer]:
    names = (
        "CELU ELU GELU Hardshrink Hardsigmoid Hardswish Hardtanh LeakyReLU LogSigmoid Mish PReLU RReLU ReLU ReLU6 SELU "
        "SiLU Sigmoid Softplus Softshrink Softsign Tanh Tanhshrink Softmin Softmax LogSoftmax Identity Dropout "
        "AlphaDropout FeatureAlphaDropout Flatten GLU Softmax2d"
    )
    x = torch.randn(2, 4, 6, 6)
    over = {"Softmin": {"dim": 1}, "Softmax": {"dim": 1}, "LogSoftmax": {"dim": 1}}
    return {name: _of(getattr(nn, name)(**over.get(name, {})), x) for name in names.split()} | {
        "Threshold": _of(nn.Threshold(0.1, 2.0), x),
        "gelu with tanh": _of(nn.GELU("tanh"), x),
        "relu in place": _of(nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)), x.clone()),
    }


def _losses() -> dict[str, Layer]:
    x, y, sign = torch.randn(3, 5), torch.randn(3, 5), torch.tensor([1.0, -1.0, 1.0])
    share, classes = torch.rand(3, 5), torch.tensor([1, 0, 4])
    steps, labels = torch.randn(7, 3, 5).log_softmax(2), torch.randint(1, 5, (3, 4))
    lengths, inputs = torch.tensor([4, 2, 3]), torch.tensor([7, 7, 6])
    return {
        "L1Loss": _of(nn.L1Loss(), x, y),
        "MSELoss": _of(nn.MSELoss(), x, y),
        "HuberLoss": _of(nn.HuberLoss(), x, y),
        "SmoothL1Loss": _of(nn.SmoothL1Loss(), x, y),
        "NLLLoss": _of(nn.NLLLoss(), x, classes),
        "NLLLoss2d": _of(nn.NLLLoss(), torch.randn(2, 4, 3, 3), torch.randint(4, (2, 3, 3))),
        "CrossEntropyLoss": _of(nn.CrossEntropyLoss(label_smoothing=0.1), x, classes),
        "PoissonNLLLoss": _of(nn.PoissonNLLLoss(), x, share),
        "KLDivLoss": _of(nn.KLDivLoss(), x, share),
        "GaussianNLLLoss": _of(nn.GaussianNLLLoss(), x, y, share),
        "BCELoss": _of(nn.BCELoss(), share, share.round()),
        "BCEWithLogitsLoss": _of(nn.BCEWithLogitsLoss(), x, share),
        "SoftMarginLoss": _of(nn.SoftMarginLoss(), x, y.sign()),
        "HingeEmbeddingLoss": _of(nn.HingeEmbeddingLoss(), x, y.sign()),
        "CosineEmbeddingLoss": _of(nn.CosineEmbeddingLoss(), x, y, sign),
        "MarginRankingLoss": _of(nn.MarginRankingLoss(), x[:, 0], y[:, 0], sign),
        "MultiMarginLoss": _of(nn.MultiMarginLoss(), x, classes),
        "MultiLabelMarginLoss": _of(nn.MultiLabelMarginLoss(), x, torch.tensor([[3, 0, -1, 1, 2]] * 3)),
        "MultiLabelSoftMarginLoss": _of(nn.MultiLabelSoftMarginLoss(), x, share.round()),
        "TripletMarginLoss": _of(nn.TripletMarginLoss(), x, y, share),
        "TripletMarginWithDistanceLoss": _of(nn.TripletMarginWithDistanceLoss(), x, y, share),
        "CTCLoss": _of(nn.CTCLoss(), steps, labels, inputs, lengths),
        "ctc loss of joined targets": _of(nn.CTCLoss(), steps, labels.flatten()[:9], inputs, lengths),
        "AdaptiveLogSoftmaxWithLoss": _of(
            nn.AdaptiveLogSoftmaxWithLoss(5, 20, [5, 10], div_value=2.0), x, torch.tensor([1, 7, 15])
        ),
        "LinearCrossEntropyLoss": _of(
            getattr(nn, "LinearCrossEntropyLoss", nn.Linear)(5, 4), x, torch.tensor([1, 0, 3])
        ),
    }


def _sequences() -> dict[str, Layer]:
    x, other, hidden = torch.randn(3, 6, _NUMBER), torch.randn(3, 4, _NUMBER), torch.randn(3, 5)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[0, 4:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(6)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2]), batch_first=True)

    def encoder(**settings: Any) -> nn.TransformerEncoderLayer:
        return nn.TransformerEncoderLayer(_NUMBER, 2, 16, dropout=0.1, batch_first=True, **settings)

    return {
        "RNN": _of(nn.RNN(_NUMBER, 5), x),
        "LSTM": _of(nn.LSTM(_NUMBER, 5, 2, bidirectional=True), x),
        "GRU": _of(nn.GRU(_NUMBER, 5, 2, dropout=0.5), x),
        "RNNCell": _of(nn.RNNCell(_NUMBER, 5), x[:, 0]),
        "LSTMCell": _of(nn.LSTMCell(_NUMBER, 5), x[:, 0]),
        "GRUCell": _of(nn.GRUCell(_NUMBER, 5), x[:, 0], hidden),
        "lstm with a projection": _of(nn.LSTM(_NUMBER, 5, proj_size=3), x),
        "lstm of packed": _of(nn.LSTM(_NUMBER, 5), packed),
        "packing lstm": _of(_Packing(), x, torch.tensor([6, 4, 2])),
        "MultiheadAttention": _of(nn.MultiheadAttention(_NUMBER, 2, batch_first=True), x, x, x),
        "attention of masks": _of(
            nn.MultiheadAttention(_NUMBER, 2, dropout=0.1, batch_first=True), x, x, x, mask, True, causal
        ),
        "attention without weights": _of(
            nn.MultiheadAttention(_NUMBER, 2, batch_first=True), x, x, x, need_weights=False
        ),
        "attention in evaluation": _of(nn.MultiheadAttention(_NUMBER, 2, batch_first=True).eval(), x, x, x),
        "TransformerEncoderLayer": _of(encoder(), x),
        "encoder layer with gelu": _of(encoder(activation="gelu"), x),
        "encoder layer in evaluation": _of(encoder().eval(), x),
        "TransformerEncoder": _of(nn.TransformerEncoder(encoder(), 2), x, causal, mask, True),
        "TransformerDecoderLayer": _of(nn.TransformerDecoderLayer(_NUMBER, 2, 16, batch_first=True), x, other),
        "TransformerDecoder": _of(
            nn.TransformerDecoder(nn.TransformerDecoderLayer(_NUMBER, 2, 16, batch_first=True), 1), x, other
        ),
        "Transformer": _of(nn.Transformer(_NUMBER, 2, 1, 1, 16, batch_first=True), x, other),
        "Embedding": _of(nn.Embedding(9, 4), torch.tensor([1, 5])),
        "embedding with a largest norm": _of(nn.Embedding(9, 4, 0, max_norm=0.5), torch.tensor([1, 5])),
        "EmbeddingBag": _of(nn.EmbeddingBag(9, 4), torch.tensor([1, 5, 7]), torch.tensor([0, 2])),
        "sums of embeddings": _of(
            nn.EmbeddingBag(9, 4, mode="sum"), torch.tensor([[1, 5], [0, 8]]), None, torch.rand(2, 2)
        ),
        "largest of embeddings": _of(nn.EmbeddingBag(9, 4, mode="max"), torch.tensor([1, 5, 7]), torch.tensor([0, 2])),
    }


class _Packing(nn.Module):
    """Packs what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(_NUMBER, 5, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        padded: Tensor = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], batch_first=True)[0]
        return padded


def _others(spaces: dict[int, Tensor]) -> dict[str, Layer]:
    x, y = torch.randn(3, 4, _NUMBER), torch.randn(3, 4, _NUMBER)
    image = spaces[2]
    return {
        "Linear": _of(nn.Linear(_NUMBER, 4), x),
        "Bilinear": _of(nn.Bilinear(_NUMBER, _NUMBER, 3), x, y),
        "LayerNorm": _of(nn.LayerNorm(_NUMBER), x),
        "GroupNorm": _of(nn.GroupNorm(2, 4), image),
        "RMSNorm": _of(nn.RMSNorm(_NUMBER), x),
        "LocalResponseNorm": _of(nn.LocalResponseNorm(2), image),
        "ChannelShuffle": _of(nn.ChannelShuffle(2), image),
        "PixelShuffle": _of(nn.PixelShuffle(2), image),
        "PixelUnshuffle": _of(nn.PixelUnshuffle(2), image),
        "Unflatten": _of(nn.Unflatten(2, (2, 4)), x),
        "Fold": _of(nn.Fold((4, 5), (2, 2)), torch.randn(2, 12, 12)),
        "Unfold": _of(nn.Unfold((2, 3), stride=2), image),
        "Upsample": _of(nn.Upsample(scale_factor=2), image),
        "UpsamplingNearest2d": _of(nn.UpsamplingNearest2d(scale_factor=2), image),
        "UpsamplingBilinear2d": _of(nn.UpsamplingBilinear2d(scale_factor=2), image),
        "CosineSimilarity": _of(nn.CosineSimilarity(), x, y),
        "PairwiseDistance": _of(nn.PairwiseDistance(), x, y),
        "weight norm": _of(nn.utils.parametrizations.weight_norm(nn.Linear(_NUMBER, 4)), x),
        "spectral norm": _of(nn.utils.parametrizations.spectral_norm(nn.Linear(_NUMBER, 4)).eval(), x),
    }


def _functions(spaces: dict[int, Tensor]) -> dict[str, Layer]:
    image = spaces[2]
    query = torch.randn(2, 4, 6, _NUMBER)
    square = torch.randn(3, 4, 4)
    wide = torch.randn(2, 64)

    def scaled(mode: str, axes: int, **settings: Any) -> Layer:
        return _of(
            Calls(lambda one: functional.interpolate(one, scale_factor=1.5, mode=mode, **settings)), spaces[axes]
        )

    def calling(function: Callable[..., Any], *args: Any) -> Layer:
        return _of(Calls(function), *args)

    return {
        **{
            f"interpolate {mode}": scaled(mode, axes)
            for mode, axes in (
                ("linear", 1),
                ("bilinear", 2),
                ("bicubic", 2),
                ("trilinear", 3),
                ("area", 2),
                ("nearest-exact", 2),
            )
        },
        "interpolate antialiased": scaled("bilinear", 2, antialias=True),
        "grid sample": calling(functional.grid_sample, image, torch.rand(2, 5, 5, 2)),
        "affine grid": calling(lambda one: functional.affine_grid(one, [2, 3, 4, 4]), torch.randn(2, 2, 3)),
        "scaled dot product": calling(functional.scaled_dot_product_attention, query, query, query),
        "causal product": calling(
            lambda one: functional.scaled_dot_product_attention(one, one, one, is_causal=True), query
        ),
        "grouped product": calling(
            lambda one: functional.scaled_dot_product_attention(one, one[:, :2], one[:, :2], enable_gqa=True), query
        ),
        "masked product": calling(functional.scaled_dot_product_attention, query, query, query, torch.randn(6, 6)),
        "einsum and its kin": calling(_einsum, torch.randn(3, 3, 3), torch.randn(3, 3, 3)),
        "linear algebra": calling(_linear_algebra, square),
        "a spectrum": calling(lambda a: torch.fft.irfft2(torch.fft.rfft2(a) * 0.5) + torch.fft.fft(a).real, image),
        "short spectrum": calling(_short_spectrum, wide),
        "routing of tokens": calling(_routing, wide),
        "rotation of pairs": calling(_rotation, wide),
        "moved places": calling(_moved, wide),
        "random noise": calling(_noise, wide),
        "mixture of numbers": calling(_mixture, wide),
    }


def _einsum(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("bij,bjk->bik", a, b) + torch.tensordot(a, b, 2).sum()


def _linear_algebra(a: Tensor) -> Tensor:
    positive = a @ a.mT + 4 * torch.eye(4)
    found: Tensor = torch.linalg.solve(positive, a) + torch.linalg.inv(positive) + torch.linalg.cholesky(positive)
    numbers = torch.linalg.svdvals(a).sum() + torch.linalg.det(a).sum() + torch.linalg.eigvalsh(positive).sum()
    return found + numbers + torch.linalg.qr(a)[0] + torch.linalg.lstsq(a, a)[0]


def _short_spectrum(a: Tensor) -> Tensor:
    window = torch.hann_window(16)
    return torch.istft(torch.stft(a, 16, return_complex=True, window=window), 16, window=window)


def _routing(a: Tensor) -> Tensor:
    places = a.topk(4)[1]
    chosen = torch.zeros_like(a).scatter(1, places, 1.0).index_add(0, torch.tensor([1]), a[:1])
    return chosen + a.sort()[0].cumsum(1) + a.softmax(1) + a[a > 0].mean() + functional.one_hot(a.argmax(1), 64)


def _rotation(a: Tensor) -> Tensor:
    turned = torch.view_as_complex(a.reshape(2, 32, 2)) * torch.polar(torch.ones(32), torch.arange(32.0))
    return torch.view_as_real(turned).flatten(1)


def _moved(a: Tensor) -> Tensor:
    twice = torch.stack([a, a], 1).flatten(1)
    moved = torch.cat([a.roll(1, 1), a.flip(1), a.tril(), a.repeat(1, 2), twice], 1)
    return moved.unfold(1, 4, 2).clamp(-1, 1).masked_fill(torch.tensor(True), 0.5)


def _noise(a: Tensor) -> Tensor:
    drawn = torch.rand(2, 64) + torch.bernoulli(torch.full((2, 64), 0.5))
    return a + torch.randn_like(a) + drawn + functional.gumbel_softmax(a)


def _mixture(a: Tensor) -> Tensor:
    numbers = a.quantile(0.5) + a.std() + torch.cdist(a, a).sum() + a.norm() + torch.logsumexp(a, 1).sum()
    return torch.div(a, 3, rounding_mode="floor") + numbers
