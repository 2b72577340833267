"""MXFP8 arithmetic: the quantiser, and linear maps whose operands pass through it in all three of their GEMMs.

A block of 32 consecutive values becomes E4M3 data and one E8M0 scale, a power of two, as torchao makes them
(`torchao.prototype.mx_formats.mx_tensor.to_mx`), bit for bit: trainer and rollout both call this module, so they agree
with each other. On Blackwell the maps are torchao's, on its MX units; everywhere else they are emulated, GEMMs over
quantised and dequantised operands with float32 accumulation. Blocks lie along the dimension that a GEMM sums over: `in`
in the forward pass, `out` for the input's gradient, tokens for the weight's.

With weights only (`Mxfp8Settings.activations` false) the maps are the plain ones, in their operands' own type, by
weights that were quantised along `in` and dequantised.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from beam_rl.model import numerics
from beam_rl.model.mxfp8_config import BLOCK, Mxfp8Settings
from beam_rl.model.tensors import FUSED, runs

E4M3_MAX = 448.0
E8M0_BIAS = 127
SCALE_SUFFIX = "_scale"
"""What the name of a weight's scales has behind the weight's own name."""
_FLOAT32_MANTISSA = 23
_EXPONENT_BITS = 0x7F800000
_E4M3_MANTISSA = 3
_E4M3_MAX_EXPONENT = 8
_E4M3_SMALLEST_NORMAL = 2.0**-6


def quantize(x: Tensor, scaling: str) -> tuple[Tensor, Tensor]:
    """E4M3 data [..., n] and E8M0 scales [..., ceil(n / 32)] of x [..., n], bfloat16 or float32.

    A last block of fewer than 32 values is quantised as if zeros followed. A block with a NaN gets the scale NaN.
    """
    blocks, size = _blocks(x, -1)
    exponent, _, reciprocal = _scales(blocks, -1, scaling)
    data = (blocks * reciprocal).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    scale = torch.where(exponent.isnan(), 255.0, exponent + E8M0_BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
    return data.flatten(-2)[..., :size].contiguous(), scale.squeeze(-1)


def dequantize(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [..., n] of data [..., n] and scale [..., ceil(n / 32)]; exact in bfloat16 down to 1e-36."""
    blocks, size = _blocks(data.float(), -1)
    return (blocks * scale.float()[..., None]).flatten(-2)[..., :size].to(dtype)


def round_trip(x: Tensor, scaling: str, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """x quantised along `dim` and dequantised, in `dtype` (default: x's; bfloat16 holds every result).

    Without a conversion to E4M3 and back, which takes a CPU ten times as long: adding and subtracting a number whose
    last bit has the value of E4M3's last bit rounds in the same way.
    """
    dim %= x.dim()
    blocks, size = _blocks(x, dim)
    _, scale, reciprocal = _scales(blocks, dim + 1, scaling)
    values = (blocks * reciprocal).clamp_(-E4M3_MAX, E4M3_MAX)
    power = (values.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)  # of two, not above the value
    shift = power.clamp_(min=_E4M3_SMALLEST_NORMAL).mul_(1.5 * 2.0 ** (_FLOAT32_MANTISSA - _E4M3_MANTISSA))
    values.add_(shift).sub_(shift).mul_(scale)
    return values.flatten(dim, dim + 1).narrow(dim, 0, size).to(dtype or x.dtype)


def pack(tensors: Iterable[tuple[str, Tensor]], settings: Mxfp8Settings) -> Iterator[tuple[str, Tensor]]:
    """Named tensors with those that the settings cover as E4M3 data, each followed by its scales, `<name>_scale`."""
    for name, tensor in tensors:
        if _covered(name, settings):
            data, scale = quantize(tensor, settings.scaling)
            yield name, data
            yield name + SCALE_SUFFIX, scale
        else:
            yield name, tensor


def round_covered(tensors: Iterable[tuple[str, Tensor]], settings: Mxfp8Settings) -> Iterator[tuple[str, Tensor]]:
    """Named tensors with those that the settings cover quantised and dequantised, in their own dtype.

    Tensors on the meta device come as they are.
    """
    for name, tensor in tensors:
        rounded = _covered(name, settings) and not tensor.is_meta
        yield name, _rounded(tensor, settings.scaling) if rounded else tensor


def _covered(name: str, settings: Mxfp8Settings) -> bool:
    """Whether the settings cover a tensor; one of a layer's experts if they cover the first, as they do all or none."""
    if match := FUSED.fullmatch(name):
        name = f"{match['experts']}.0.{'down' if match['kind'] == 'down' else 'gate'}_proj"
    return settings.covers(name)


def _rounded(tensor: Tensor, scaling: str) -> Tensor:
    """`round_trip` of a matrix or a stack of them, of as many rows at once as suit the device."""
    rows = tensor.flatten(0, -2)
    result = torch.empty_like(rows)
    for run in runs(rows):
        result[run] = round_trip(rows[run], scaling)
    return result.view(tensor.shape)


def for_rollout(tensors: Iterator[tuple[str, Tensor]], settings: Mxfp8Settings | None) -> Iterator[tuple[str, Tensor]]:
    """Named weights as a rollout takes them: under MXFP8 as data and scales.

    With weights only they are dequantised: the rollout is then a plain model and needs to know nothing of it.
    """
    return pack(tensors, settings) if settings and settings.activations else for_checkpoint(tensors, settings)


def for_checkpoint(
    tensors: Iterator[tuple[str, Tensor]], settings: Mxfp8Settings | None
) -> Iterator[tuple[str, Tensor]]:
    """Named weights as a checkpoint of the policy holds them: under MXFP8 of weights only, rounded.

    With activations, too, no checkpoint is the policy without the arithmetic, and its weights stay whole.
    """
    return tensors if settings is None or settings.activations else round_covered(tensors, settings)


def _blocks(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """x in float32 with `dim` split into (blocks, 32), zeros behind its end where needed, and the size that it had."""
    size = x.shape[dim]
    x = x.float()
    if spare := -size % BLOCK:
        x = F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, spare])
    return x.unflatten(dim, (x.shape[dim] // BLOCK, BLOCK)), size


def _scales(blocks: Tensor, dim: int, scaling: str) -> tuple[Tensor, Tensor, Tensor]:
    """Exponents of the blocks' scales, the scales, and the factors that undo them, float32, size 1 in `dim`.

    The steps are torchao's: ceil(log2(x)) in float32 is not the exact ceiling near powers of two, and blocks with the
    smallest scale or a NaN are treated in ways of their own.
    """
    largest = blocks.abs().amax(dim, keepdim=True)
    if scaling == "rceil":
        exponent = (largest / E4M3_MAX).log2_().ceil_().clamp_(-E8M0_BIAS, E8M0_BIAS)
        scale = exponent.exp2()
        return exponent, scale, scale.reciprocal().masked_fill_(exponent == -E8M0_BIAS, 1.0)
    bits = largest.view(torch.int32) >> _FLOAT32_MANTISSA  # a magnitude has no sign bit
    exponent = (bits - (E8M0_BIAS + _E4M3_MAX_EXPONENT)).clamp_(min=-E8M0_BIAS).float()
    reciprocal = exponent.clamp(min=1 - E8M0_BIAS).exp2_().reciprocal_()
    broken = largest.isnan()
    exponent.masked_fill_(broken, torch.nan)
    return exponent, exponent.exp2(), reciprocal.masked_fill_(broken, 0.0)


def linear(x: Tensor, weight: Tensor, settings: Mxfp8Settings) -> Tensor:
    """x [..., in] times weight [out, in] transposed, both in MXFP8, as their gradients' GEMMs are; in x's dtype.

    With weights only, x is multiplied with the rounded weight, and so is the output's gradient.
    """
    if not settings.activations:
        return _RoundedWeight.apply(x, weight, None, settings.scaling)
    if _native(x):
        return _native_linear(x, weight, settings.scaling)
    return _Linear.apply(x, weight, settings.scaling)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, settings: Mxfp8Settings) -> Tensor:
    """`numerics.expert_linear` in MXFP8, gradients included; rounded as it is: float32 on a CPU, else x's dtype.

    Args:
        x: [rows, in], sorted by expert.
        weight: [experts, out, in].
        ends: int32 [experts], the row after each expert's last.
    """
    if not settings.activations:
        return _RoundedWeight.apply(x, weight, ends, settings.scaling)
    if _native(x):
        return _native_grouped_linear(x, weight, ends, settings.scaling)
    return _GroupedLinear.apply(x, weight, ends, settings.scaling)


def _operand(x: Tensor) -> torch.dtype:
    """Type of the emulated GEMMs' operands, which hold quantised values exactly either way."""
    return torch.float32 if x.device.type == "cpu" else x.dtype


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scaling: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scaling = scaling
        dtype = _operand(x)
        return F.linear(round_trip(x, scaling, dtype=dtype), round_trip(weight, scaling, dtype=dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        scaling, dtype = ctx.scaling, _operand(x)
        grad, rows = grads[0].flatten(0, -2), x.flatten(0, -2)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            product = round_trip(grad, scaling, dtype=dtype) @ round_trip(weight, scaling, 0, dtype)
            x_grad = product.to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            product = round_trip(grad, scaling, 0, dtype).t() @ round_trip(rows, scaling, 0, dtype)
            weight_grad = product.to(weight.dtype)
        return x_grad, weight_grad, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, scaling: str) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.scaling = scaling
        dtype = _operand(x)
        return numerics.expert_linear(
            round_trip(x, scaling, dtype=dtype), round_trip(weight, scaling, dtype=dtype), ends
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        scaling, dtype = ctx.scaling, _operand(x)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            rows = round_trip(grads[0], scaling, dtype=dtype)
            x_grad = F.grouped_mm(rows, round_trip(weight, scaling, 1, dtype), offs=ends).to(x.dtype)
        if ctx.needs_input_grad[1]:
            places, padded_ends, size = _padded_groups(ends, len(x))
            grad, rows = (
                round_trip(tensor.new_zeros(size, tensor.shape[1]).index_copy_(0, places, tensor), scaling, 0, dtype)
                for tensor in (grads[0], x)
            )
            weight_grad = F.grouped_mm(grad.t(), rows, offs=padded_ends).to(weight.dtype)
        return x_grad, weight_grad, None, None


class _RoundedWeight(torch.autograd.Function):
    """x [..., in] times a rounded weight [out, in], or rows [rows, in] times their experts' [experts, out, in].

    The weight is rounded again for x's gradient, which costs less than keeping it. Its own gradient is that of the
    weight as it is: it passes straight through the rounding.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor | None, scaling: str) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        ctx.scaling = scaling
        rounded = round_trip(weight, scaling)
        return torch.matmul(x, rounded.t()) if ends is None else numerics.expert_linear(x, rounded, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].flatten(0, -2).contiguous()  # of experts on a CPU: float32
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            rounded = round_trip(weight, ctx.scaling, dtype=grad.dtype)
            product = grad @ rounded if ends is None else F.grouped_mm(grad, rounded, offs=ends)
            x_grad = product.to(x.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            rows = x.flatten(0, -2).to(grad.dtype)
            product = grad.t() @ rows if ends is None else F.grouped_mm(grad.t(), rows, offs=ends)
            weight_grad = product.to(weight.dtype)
        return x_grad, weight_grad, None, None


def _padded_groups(ends: Tensor, rows: int) -> tuple[Tensor, Tensor, int]:
    """Where rows go when every expert's begin at a multiple of the block, so that no block has rows of two experts.

    Returns:
        the place of every row, int64 [rows]; the end of every expert's rows, int32; the number of places.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    padded_ends = (counts + BLOCK - 1).div(BLOCK, rounding_mode="floor").mul(BLOCK).cumsum(0, dtype=torch.int32)
    shifts = torch.cat((ends.new_zeros(1), padded_ends[:-1] - ends[:-1]))
    places = torch.arange(rows, device=ends.device) + shifts.repeat_interleave(counts, output_size=rows)
    return places, padded_ends, -(-(rows + (BLOCK - 1) * len(ends)) // BLOCK) * BLOCK


def _native(x: Tensor) -> bool:
    """Whether torchao's kernels compute this on MX units; the only place where that is decided."""
    return x.dtype == torch.bfloat16 and _has_mx_units(x.device)


@cache
def _has_mx_units(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0):
        return False
    from torchao.prototype.moe_training import mxfp8_grouped_mm  # here: seconds that other processes need not spend

    return mxfp8_grouped_mm._SM100_KERNELS_AVAILABLE


def _native_linear(x: Tensor, weight: Tensor, scaling: str) -> Tensor:
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    rows = x.flatten(0, -2)
    padded = F.pad(rows, [0, 0, 0, -len(rows) % BLOCK])  # the weight's gradient has blocks of tokens
    mode = ScaleCalculationMode(scaling)
    product = _to_mxfp8_then_scaled_mm(padded, weight, KernelPreference.AUTO, mode)
    return product[: len(rows)].view(*x.shape[:-1], -1)


def _native_grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, scaling: str) -> Tensor:
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common import KernelPreference

    return _to_mxfp8_then_scaled_grouped_mm(
        x,
        weight.transpose(1, 2),
        ends,
        out_dtype=x.dtype,
        kernel_preference=KernelPreference.AUTO,
        scale_calculation_mode=ScaleCalculationMode(scaling),
        pad_token_groups_for_grouped_mm=True,
    )
