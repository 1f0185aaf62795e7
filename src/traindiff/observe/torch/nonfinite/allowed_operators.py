"""The operators that a saved call may hold: reviewed by name, and by the types of their arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from traindiff.core.site import printable
from traindiff.core.torch_compat.operators import is_overload, operator_schema, schemas_of
from traindiff.observe.torch.nonfinite.argument_checks import misfit
from traindiff.observe.torch.nonfinite.operations import Json, Operation

_ELEMENTWISE = """
abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min complex _conj _conj_physical
conj_physical copysign cos cosh deg2rad digamma div elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin
fmod frac frexp gcd ge gelu gt hardshrink hardsigmoid hardswish hardtanh heaviside huber_loss hypot i0 igamma igammac
isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp lgamma log log10 log1p log2 log_sigmoid_forward
logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum mish mul
mvlgamma nan_to_num ne neg _neg_view nextafter polar polygamma pow _prelu_kernel rad2deg reciprocal relu relu6
remainder round rrelu_with_noise rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink
special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w special_entr
special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1 special_i1e
special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0
special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w
special_spherical_bessel_j0 special_xlog1py special_zeta sqrt square sub tan tanh threshold trunc where xlogy
"""

_REDUCTIONS = """
all allclose amax amin aminmax any argmax argmin argsort bincount bucketize count_nonzero cummax cummin cumprod cumsum
dist equal histc histogram isin kthvalue _local_scalar_dense _log_softmax logcumsumexp logsumexp max mean median min
mode nanmedian nansum nonzero nonzero_static norm prod renorm _safe_softmax searchsorted _softmax sort std std_mean
sum topk trace _unique2 unique_consecutive unique_dim var var_mean
"""

_PRODUCTS = """
addbmm addmm addmv addr baddbmm bmm _cdist_forward cholesky cholesky_inverse cholesky_solve convolution dot _fft_c2c
_fft_c2r _fft_r2c _linalg_check_errors linalg_cholesky_ex linalg_cross _linalg_det linalg_eig _linalg_eigh
linalg_householder_product linalg_inv_ex linalg_lstsq linalg_lu linalg_lu_factor_ex linalg_matrix_exp linalg_pinv
linalg_qr _linalg_slogdet _linalg_solve_ex linalg_solve_triangular _linalg_svd linalg_vector_norm linear mm mv
_pdist_forward _trilinear vdot
"""

_PLACES = """
alias alias_copy as_strided as_strided_copy as_strided_scatter block_diag cat channel_shuffle clone col2im
constant_pad_nd copy detach diag_embed diagonal diagonal_copy diagonal_scatter expand expand_copy fill flip gather
im2col index index_add index_copy index_fill index_put index_reduce index_select lift_fresh masked_scatter
masked_select narrow_copy permute permute_copy pixel_shuffle pixel_unshuffle put reflection_pad1d reflection_pad2d
reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d resize_as roll rot90
scatter scatter_add scatter_reduce select select_copy select_scatter slice slice_copy slice_scatter split split_copy
split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack t t_copy take _to_copy transpose transpose_copy tril
triu unbind unbind_copy unfold unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes _unsafe_view unsqueeze
unsqueeze_copy view view_as_complex view_as_real view_copy zero
"""

_NEW = """
arange bartlett_window bernoulli blackman_window cauchy empty empty_like empty_permuted empty_strided exponential eye
full full_like geometric hamming_window hann_window kaiser_window linspace log_normal logspace multinomial
native_dropout new_empty new_empty_strided new_full new_ones new_zeros normal ones ones_like rand rand_like randint
randint_like randn randn_like random randperm scalar_tensor tril_indices triu_indices uniform zeros zeros_like
"""

_LAYERS = """
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_max_pool2d adaptive_max_pool3d affine_grid_generator avg_pool2d
avg_pool3d _batch_norm_no_update _batch_norm_with_update binary_cross_entropy binary_cross_entropy_with_logits
_ctc_loss embedding _embedding_bag _embedding_bag_forward_only embedding_renorm fractional_max_pool2d
fractional_max_pool3d _fused_rms_norm glu grid_sampler_2d grid_sampler_3d max_pool2d_with_indices
max_pool3d_with_indices max_unpool2d max_unpool3d mse_loss multi_margin_loss multilabel_margin_loss_forward
native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training native_group_norm native_layer_norm
_native_multi_head_attention nll_loss2d_forward nll_loss_forward _pack_padded_sequence
_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
_scaled_dot_product_flash_attention_for_cpu smooth_l1_loss soft_margin_loss _thnn_fused_gru_cell _thnn_fused_lstm_cell
_transformer_encoder_layer_fwd upsample_bicubic2d _upsample_bicubic2d_aa upsample_bilinear2d _upsample_bilinear2d_aa
upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_trilinear3d _weight_norm_interface
"""

_GRADIENTS = """
convolution_backward diagonal_backward elu_backward gelu_backward hardsigmoid_backward hardswish_backward
hardtanh_backward leaky_relu_backward _log_softmax_backward_data logit_backward mish_backward mse_loss_backward
native_dropout_backward select_backward sigmoid_backward silu_backward slice_backward _softmax_backward_data
softplus_backward tanh_backward threshold_backward unfold_backward
"""
"""Of modules that differentiate in their forward passes."""

ALLOWED = frozenset(
    " ".join((_ELEMENTWISE, _REDUCTIONS, _PRODUCTS, _PLACES, _NEW, _LAYERS, _GRADIENTS)).split()
)  # fmt: skip
"""Operators of `aten` by name, without the `_` of those that write into their argument.

Each computes from its tensors and numbers alone, and checks the bounds of what it reads and writes, or
`argument_checks` does. Missing on purpose: what reads or writes files, memory or the process (`from_file`, `set_`,
`record_stream`); calls with `out=`, whose sizes not all operators check; what trusts its indices, sizes or numbers
(`_unsafe_index`, `_reshape_alias`, `_index_put_impl_`, `segment_reduce`, `linalg_lu_solve`, `range`, most of
`*_backward`); other layouts, quantized numbers, and tensors of tensors.
"""

_TEXTS: Mapping[tuple[str, str], frozenset[str]] = {
    ("_linalg_eigh", "UPLO"): frozenset({"L", "U"}),
    ("_linalg_svd", "driver"): frozenset({"gesvd", "gesvdj", "gesvda"}),
    ("div", "rounding_mode"): frozenset({"trunc", "floor"}),
    ("gelu", "approximate"): frozenset({"none", "tanh"}),
    ("gelu_backward", "approximate"): frozenset({"none", "tanh"}),
    ("index_reduce", "reduce"): frozenset({"prod", "mean", "amax", "amin"}),
    ("linalg_lstsq", "driver"): frozenset({"gels", "gelsy", "gelsd", "gelss"}),
    ("linalg_qr", "mode"): frozenset({"reduced", "complete", "r"}),
    ("scatter", "reduce"): frozenset({"add", "multiply"}),
    ("scatter_reduce", "reduce"): frozenset({"sum", "prod", "mean", "amax", "amin"}),
    ("searchsorted", "side"): frozenset({"left", "right"}),
    ("_linalg_check_errors", "api_name"): frozenset(
        f"{prefix}linalg.{name}"
        for prefix in ("", "torch.")
        for name in (
            "cholesky", "cholesky_ex", "eigh", "eigvalsh", "inv", "inv_ex", "ldl_factor", "ldl_factor_ex", "lu_factor",
            "lu_factor_ex", "solve", "solve_ex",
        )
    ),
}  # fmt: skip
"""The texts that an argument of an operator may be. No other argument may be a text."""

_NAME = re.compile(r"aten\.(_?[a-zA-Z][a-zA-Z0-9_]*)\.([a-zA-Z][a-zA-Z0-9_]*)", re.ASCII)
_LONGEST_NAME = 100


class RefusedOperatorError(Exception):
    """Raised for an operator that is not allowed; the message is a clause that names it and gives the reason."""


def allowed_operator(name: str) -> Any:
    """The operator of a name such as `aten.add.Tensor`.

    Nothing is looked up by a text that is not a name in `ALLOWED`, or one of the overloads that torch lists for it.

    Raises:
        RefusedOperatorError: It is none that a saved call may hold, or this torch does not have it.
    """
    found = _NAME.fullmatch(name) if len(name) <= _LONGEST_NAME else None
    if found is None or found[1].removesuffix("_") not in ALLOWED:
        raise RefusedOperatorError(
            f"{printable(name[:_LONGEST_NAME])} is not among the operators that traindiff rerun calls"
        )
    return _operator(found[1], found[2])


@cache
def _operator(name: str, overload: str) -> Any:
    shown = f"aten.{name}.{overload}"
    schemas = {one.overload_name or "default": one for one in schemas_of(f"aten::{name}")}
    operator = getattr(getattr(torch.ops.aten, name), overload, None) if overload in schemas else None
    if not is_overload(operator):
        raise RefusedOperatorError(f"the torch that is installed here has no operator {shown}")
    schema = schemas[overload]
    if not any("Tensor" in str(one.real_type) for one in (*schema.arguments, *schema.returns)):
        raise RefusedOperatorError(f"{shown} takes and returns no tensor")  # of TorchScript: 1 % 0 ends the process
    if any(one.kwarg_only and one.alias_info is not None for one in schema.arguments):
        raise RefusedOperatorError(f"{shown} writes into out=, whose size not all operators of torch check")
    for one in (*schema.arguments, *schema.returns):
        if not _is_plain(name, one):
            raise RefusedOperatorError(
                f"{shown} takes or returns a {one.real_type} ({one.name}), and traindiff rerun calls only operators "
                "of tensors and numbers"
            )
    return operator


_PLAIN = frozenset(
    {"Tensor", "int", "bool", "float", "number", "complex", "ScalarType", "Device", "Layout", "MemoryFormat"}
)


def _is_plain(name: str, argument: Any) -> bool:
    kind = str(argument.real_type)
    if kind == "Optional[Generator]":
        return True  # only None fits
    inner = re.sub(r"(?:Optional|List)\[|\]", "", kind)
    return inner in _PLAIN or (kind in ("str", "Optional[str]") and bool(_texts(name, argument.name)))


def _texts(name: str, argument: str) -> frozenset[str]:
    return _TEXTS.get((name.removesuffix("_"), argument), frozenset())


def check(operation: Operation) -> Any:
    """The operator of an operation, all of whose arguments are of the types that it declares.

    Raises:
        RefusedOperatorError: It may not be called, or not with these arguments.
    """
    operator = allowed_operator(operation.name)
    name, arguments = operation.name.split(".")[1], operator_schema(operator).arguments
    for argument, value in bound(operation, arguments).items():
        wrong = misfit(str(argument.real_type), value, _texts(name, argument.name))
        if wrong:
            raise RefusedOperatorError(f"{operation.name} was given {wrong}, for its argument {argument.name}")
    return operator


def bound(operation: Operation, arguments: Any) -> dict[Any, Json]:
    """The arguments that an operation gives, by those that its operator declares.

    Raises:
        RefusedOperatorError: There are more, one twice, or one of another name.
    """
    positional = [one for one in arguments if not one.kwarg_only]
    if len(operation.args) > len(positional):
        raise RefusedOperatorError(
            f"{operation.name} was given {len(operation.args)} positional arguments, and takes {len(positional)}"
        )
    found = dict(zip(positional, operation.args, strict=False))
    by_name = {one.name: one for one in arguments}
    for key, value in operation.kwargs.items():
        if key not in by_name:
            raise RefusedOperatorError(f"{operation.name} has no argument {printable(key[:_LONGEST_NAME])}")
        if by_name[key] in found:
            raise RefusedOperatorError(f"{operation.name} was given its argument {key} twice")
        found[by_name[key]] = value
    return found
